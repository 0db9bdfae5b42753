"""Models that torch.compile has been at: static shapes only, never eager unnoticed, no prefixes.

A kernel for dynamic shapes is chosen by the shapes that a process happened to see first, and a
function that was compiled for too many shapes silently runs in eager mode: other bits, both.
`numerics.pin` sets torch's compiler so that neither happens; here is what is left to do for the
model itself. The few private names of torch that this takes are used in this module only.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from samestep.errors import NotExactError

LIMIT_PER_COPY: Final = 8


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrappers that `torch.compile(module)` puts around it or its parts.

    What was wrapped stays compiled, as `module.compile()` would have made it; so no name carries
    `_orig_mod.`.
    """
    model = _unwrapped(model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _unwrapped(child)
    return model


def refuse_dynamic(model: nn.Module) -> None:
    """Refuses modules that were compiled for dynamic shapes.

    Raises:
        NotExactError: names the module.
    """
    for name, module in model.named_modules():
        if module._compiled_call_impl is None:
            continue
        context = _context(module._compiled_call_impl)
        if getattr(context, "_dynamic", None) or getattr(context, "_shapes_spec", None):
            raise NotExactError(
                f"module {name or type(module).__name__} is compiled for dynamic shapes: its "
                "kernels depend on which shapes a worker saw first; use "
                "model.compile(dynamic=False)"
            )


def compile_alike(model: nn.Module, source: nn.Module, *, num_copies: int) -> None:
    """Compiles the modules of a copy as those that they were copied from.

    A copy of a compiled module is not compiled, so it would give other bits. Torch's limit counts
    what all copies are compiled for together, so it is raised to hold for each.
    """
    if not is_compiled(source):
        return
    import torch._dynamo.config as compiler

    compiler.recompile_limit = max(compiler.recompile_limit, LIMIT_PER_COPY * num_copies)
    for ours, theirs in zip(model.modules(), source.modules(), strict=True):
        if theirs._compiled_call_impl is not None:
            ours._compiled_call_impl = _context(theirs._compiled_call_impl)(ours._call_impl)


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of the model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _unwrapped(module: nn.Module) -> nn.Module:
    # By name: importing the compiler's class costs seconds where nothing was compiled.
    while type(module).__name__ == "OptimizedModule":
        inner: Any = module._orig_mod
        inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
        module = inner
    return module


def _context(compiled: Any) -> Any:
    """What torch.compile made the function with: it knows backend, options and `dynamic`."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return cells["self"].cell_contents
