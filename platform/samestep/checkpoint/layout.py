"""How a tensor lies in memory: dtype, shape and strides, kept with it and given back.

Strides belong to the state: kernels choose by them, and a fused optimizer whose moments lie
otherwise than their parameter trains wrongly without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from samestep.errors import CheckpointError

if TYPE_CHECKING:  # a manifest holds layouts, and is read where no tensor is
    import torch
    from torch import Tensor

_STORABLE: Final = (
    "bool",
    "uint8", "uint16", "uint32", "uint64",
    "int8", "int16", "int32", "int64",
    "bfloat16", "float16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "complex64", "complex128",
)  # fmt: skip
"""Names of dtypes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Dtype (without "torch."), shape and strides (in elements) of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, *, name: str) -> Layout:
        """The layout of a tensor that can be kept.

        Raises:
            CheckpointError: it is sparse or of a dtype that files can't hold, or several of its
                elements share memory, so that it could not be written back.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
            raise CheckpointError(
                f"{name}: a tensor of layout {tensor.layout} on device {tensor.device} can't be "
                "kept in a checkpoint; only dense ones can: use tensor.to_dense()"
            )
        if dtype not in _STORABLE:
            raise CheckpointError(
                f"{name}: a tensor of dtype {dtype} can't be kept in a checkpoint; allowed are "
                f"{', '.join(_STORABLE)}"
            )
        layout = cls(dtype=dtype, shape=tuple(tensor.shape), strides=tuple(tensor.stride()))
        if layout.overlaps:
            raise CheckpointError(
                f"{name}: elements of this tensor share memory (shape {list(layout.shape)}, "
                f"strides {list(layout.strides)}), so it can't be restored; use tensor.clone()"
            )
        return layout

    @property
    def overlaps(self) -> bool:
        """Whether two elements may lie at one place, as in an expanded tensor."""
        reach = 0
        for stride, size in sorted(self.significant_strides):
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False

    @property
    def significant_strides(self) -> list[tuple[int, int]]:
        """(stride, size) of each dimension whose stride says where elements lie."""
        if 0 in self.shape:
            return []
        pairs = zip(self.strides, self.shape, strict=True)
        return [(stride, size) for stride, size in pairs if size > 1]

    def lies_as(self, other: Layout) -> bool:
        """Whether two layouts of one shape put the elements at the same places."""
        return self.significant_strides == other.significant_strides

    def check(self, *, name: str) -> None:
        """Raises CheckpointError where no tensor can have this layout (it came from a file)."""
        if (
            self.dtype not in _STORABLE
            or len(self.shape) != len(self.strides)
            or min(self.shape + self.strides, default=0) < 0
            or self.overlaps
        ):
            raise CheckpointError(f"{name}: impossible layout {self}")

    def copy(self, source: Tensor, *, device: torch.device | None = None) -> Tensor:
        """A new tensor of this layout, in memory of its own, with the values of `source`.

        Its first element is aligned as torch aligns new tensors, which no view of a file is.
        """
        import torch

        dtype, device = storable_dtype(self.dtype), device or source.device
        copied = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        return copied.copy_(source.detach())


def storable_dtype(name: str) -> torch.dtype:
    """The dtype of that name (without "torch."), one of those that files can hold."""
    import torch

    if name not in _STORABLE:
        raise KeyError(name)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def to_stored(tensor: Tensor) -> Tensor:
    """The tensor as files hold it: on the CPU, in C order, of the same shape.

    complex128, which safetensors has no name for, becomes float64 with a last dimension of 2.
    A contiguous CPU tensor is not copied.
    """
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(plain) if plain.dtype == torch.complex128 else plain


def from_stored(stored: Tensor, layout: Layout, *, name: str) -> Tensor:
    """A copy of what `to_stored` gave, laid out as the tensor it was made of.

    Raises:
        CheckpointError: the file holds another dtype or shape than the manifest says.
    """
    import torch

    if layout.dtype == "complex128" and stored.dtype == torch.float64 and stored.shape[-1:] == (2,):
        stored = torch.complex(stored[..., 0], stored[..., 1])
    if str(stored.dtype) != f"torch.{layout.dtype}" or tuple(stored.shape) != layout.shape:
        raise CheckpointError(
            f"{name}: the file holds {stored.dtype} {list(stored.shape)}, the manifest says "
            f"{layout.dtype} {list(layout.shape)}"
        )
    return layout.copy(stored)
