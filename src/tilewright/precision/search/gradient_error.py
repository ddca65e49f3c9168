"""How much a gradient differs from the one that FP32 matmuls give: gain, cosine, and what it costs the optimizer.

Plain sums over parameters, so that the change of one weight's gradient alone can be reported from a pass in which many
changed.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class GradientChange:
    """A gradient g' beside the reference g.

    Args:
        gain: <g', g> / <g, g>: below 1 it is too short along the reference, as underflow makes it.
        cosine: <g', g> / (|g'| |g|).
        lost: share of an AdamW step that no longer goes where the reference goes. AdamW scales each step to one
            length, so a gradient with cosine c makes c of the progress, and 1 - c is lost. Tensors are scaled to one
            root mean square before, as AdamW does with its elements.

    Example:
        >>> GradientChange(1.0, 0.999, 0.001).lost
        0.001
    """

    gain: float
    cosine: float
    lost: float


@dataclass(frozen=True)
class _Sums:
    """Sums over one parameter: <g', g>, <g, g>, <g', g'> and the number of elements."""

    cross: float
    reference: float
    changed: float
    numel: int


class Compared:
    """The sums of all parameters for one changed pass."""

    def __init__(self, sums: Mapping[str, _Sums]) -> None:
        self.sums = sums

    def only(self, names: Collection[str]) -> "Compared":
        """The gradient errors of these parameters only: the sums as if theirs alone had changed."""
        kept = {
            name: s if name in names else _Sums(s.reference, s.reference, s.reference, s.numel)
            for name, s in self.sums.items()
        }
        return Compared(kept)

    def change(self, names: Collection[str] | None = None) -> GradientChange:
        """Gradient change over all parameters, or over some. Not finite where a gradient is not."""
        sums = [s for name, s in self.sums.items() if (names is None or name in names) and s.reference > 0]
        cross, reference, changed = (sum(getattr(s, part) for s in sums) for part in ("cross", "reference", "changed"))
        if not sums or changed == 0:
            return GradientChange(0.0, 0.0, 1.0) if sums else GradientChange(1.0, 1.0, 0.0)
        along = sum(s.numel * s.cross / s.reference for s in sums)
        square = sum(s.numel * s.changed / s.reference for s in sums)
        numel = sum(s.numel for s in sums)
        lost = 1 - along / math.sqrt(numel * square) if math.isfinite(along + square) and square > 0 else math.nan
        return GradientChange(cross / reference, cross / math.sqrt(reference * changed), lost)


def lost_by_batch(changes: Sequence[Compared]) -> tuple[float, ...]:
    """The share of AdamW's steps that gradient errors lose over all batches together: one value per batch, whose mean
    it is.

    AdamW divides by a second moment that many batches made. So a parameter's sums are added over the batches before
    they are scaled: a batch on which its gradient happens to be tiny, and nearly all of it rounding, then counts as
    little as it does in training. The values are those of the jackknife (Efron and Stein 1981), so their spread tells
    the error of the mean.

    Args:
        changes: of the same switch, one a batch.
    """
    whole = _summed(changes).change().lost
    if len(changes) == 1:
        return (whole,)
    without = [_summed([*changes[:batch], *changes[batch + 1 :]]).change().lost for batch in range(len(changes))]
    return tuple(len(changes) * whole - (len(changes) - 1) * lost for lost in without)


class GradientTally:
    """The gradients of a model as they are now, kept as the reference for later passes. Takes one copy of them."""

    def __init__(self, model: nn.Module) -> None:
        self._reference = {
            name: param.grad.detach().clone() for name, param in model.named_parameters() if param.grad is not None
        }

    @property
    def finite(self) -> bool:
        """True where every element of the kept gradients is finite."""
        return all(bool(torch.isfinite(grad).all()) for grad in self._reference.values())

    def against(self, model: nn.Module) -> Compared:
        """Compare the model's present gradients with the kept ones: the gradient error. A gradient that is missing now
        counts as zero."""
        present = {name: param.grad for name, param in model.named_parameters()}
        sums = [_sums(present[name], grad) for name, grad in self._reference.items()]
        rows = torch.stack(sums).tolist() if sums else []  # one wait for the device, not one a parameter
        numel = [grad.numel() for grad in self._reference.values()]
        named = zip(self._reference, rows, numel, strict=True)
        return Compared({name: _Sums(*row, numel=count) for name, row, count in named})


def _summed(changes: Sequence[Compared]) -> Compared:
    """Summed gradient errors, as if the batches' gradients were stacked. A parameter without a gradient on some batch
    has none there."""
    names = {name: s.numel for change in changes for name, s in change.sums.items()}
    found = {name: [change.sums[name] for change in changes if name in change.sums] for name in names}
    totals = ("cross", "reference", "changed")
    sums = {name: [sum(getattr(s, part) for s in found[name]) for part in totals] for name in names}
    return Compared({name: _Sums(*sums[name], numel=names[name]) for name in names})


def _sums(changed: torch.Tensor | None, reference: torch.Tensor) -> torch.Tensor:
    """Sums of a gradient error: <g', g>, <g, g>, <g', g'> as FP64 [3]; g' is zero where it is missing."""
    g = reference.float()
    h = torch.zeros_like(g) if changed is None else changed.float()
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in ((h, g), (g, g), (h, h))])
