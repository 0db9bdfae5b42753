"""What came of bisecting two runs, in sentences."""

from __future__ import annotations

from samestep.replay.bisect import Bisected
from samestep.replay.bisect_side import Apart
from samestep.replay.trace import Stats


def describe_bisected(found: Bisected) -> list[str]:
    """What was found, in lines; the first one says it all."""
    comparison = found.comparison
    if found.is_equal:
        return [f"identical through step {comparison.identical_through}: nothing to look for"]
    if found.step is None:
        first = found.quantities[0] if found.quantities else "one has more steps than the other"
        return [f"no step differs: {first}", *found.notes]
    lines = [f"first difference at step {found.step}: {found.quantities[0]}"]
    if found.shard is not None:
        lines.append(f"first shard whose loss differs: {found.shard}")
    else:
        lines.append("every shard's loss is the same: it is in backward, reduction or update")
    lines += [f"  {line}" for line in found.quantities[1:6]]
    if found.apart is not None:
        lines.append(f"first tensor that differs: {describe_apart(found.apart)}")
    for name, same in zip("ab", found.reproduced, strict=True):
        if same is not None:
            told = "gives what its ledger says" if same else "does not give what its ledger says"
            lines.append(f"run {name} taken again {told}")
    for title, items in (("jobs", comparison.spec), ("numerics", comparison.numerics)):
        if items:
            lines += [f"the {title} differ in:", *(f"  {item}" for item in items)]
    return lines + list(found.notes)


def describe_apart(apart: Apart) -> str:
    """The tensor with its values in both runs."""
    of_shard = f", shard {apart.shard}" if apart.shard >= 0 else ""
    return (
        f"{apart.name} (step {apart.step}, {apart.stage}{of_shard}): {_told(apart.in_a)} in a, "
        f"{_told(apart.in_b)} in b"
    )


def _told(stats: Stats | None) -> str:
    if stats is None:
        return "absent"
    shape = "x".join(map(str, stats.shape)) or "a number"
    broken = f", {stats.num_not_finite} not finite" if stats.num_not_finite else ""
    return f"{shape} of mean {stats.mean:.9g}, std {stats.std:.6g}{broken}"
