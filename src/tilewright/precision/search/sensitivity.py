"""Change of loss and gradients when one matmul of one layer computes in FP8: measured, one switch at a time.

At given weights, on a few batches, the model computes in FP32 but for the one matmul that is tried. The reference is
not BF16: any switch rolls the BF16 roundings of all that follows again, so the luck of the one reference pass would
are in every switch, and add up where these are added. Forward matmuls change the loss and all gradients; the other
two change gradients only. A weight-gradient matmul changes nothing but its own weight's gradient, so all of them are
tried in one pass. Read `measure` first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tilewright.core.errors import NumericsError
from tilewright.models.base.protocols import TrainableModel
from tilewright.precision.float8.linear import Float8Linear, float8_layers
from tilewright.precision.float8.share_inputs import group_experts, share_inputs
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import Policy, Rule
from tilewright.precision.search.gradient_error import Compared, GradientChange, GradientTally, lost_by_batch
from tilewright.precision.search.layer_stats import SearchUnit, facts, group_layers

Batch = Mapping[str, Tensor]
BASE = Gemms.all("fp32")
SEED = 0
"""Every pass draws the same dropout."""


@dataclass(frozen=True)
class FormatSwitch:
    """Change by one matmul in FP8, against all matmuls in FP32; one value per batch.

    `loss_change` is relative to the loss: 0.001 is 0.1 % more. `gradients` compares all parameters' gradients, `own`
    the layer's weights' alone. `lost` is the share of AdamW's steps that no longer goes where FP32's goes, estimated
    over all batches together (`gradient_error.lost_by_batch`).
    """

    unit: str
    gemm: str
    loss_change: tuple[float, ...]
    gradients: tuple[GradientChange, ...]
    own: tuple[GradientChange, ...]
    lost: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """False where a loss or a gradient of a format switch was infinite or NaN, in the measurement of sensitivity:
        such a switch cannot be made."""
        return all(map(math.isfinite, (*self.loss_change, *self.lost)))


@dataclass(frozen=True)
class Sensitivity:
    """All that was measured at one set of weights. `losses` are those in FP32, in nats a target, one a batch."""

    units: tuple[SearchUnit, ...]
    switches: tuple[FormatSwitch, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class PolicyChange:
    """Change by several switches together, measured: see `FormatSwitch`."""

    loss_change: tuple[float, ...]
    gradients: tuple[GradientChange, ...]
    lost: tuple[float, ...]


def measuring_policy(policy: Policy) -> Policy:
    """The policy under which a model's sensitivity is measured: switchable linear layers, without the head, and FP32
    around them.

    Args:
        policy: its rules, `fp32_ops`, device and kind of scale hold. What these keep out of FP8 cannot be switched.
    """
    free = () if "linear" in policy.fp32_ops else (Rule(op="linear", compute="fp8_tile"),)
    rules = (*free, Rule(op="head", compute="fp32"), *policy.rules)
    return replace(policy, mode="fp32", rules=rules, keep="value", strict=False)


def num_passes(model: nn.Module, num_batches: int) -> int:
    """Number of forward and backward passes of a sensitivity's `measure`."""
    return num_batches * (2 + 2 * len(group_layers(model)))


def measure(
    model: TrainableModel, batches: Sequence[Batch], *, advance: Callable[[int], None] = lambda done: None
) -> Sensitivity:
    """Measure sensitivity: try every matmul of every `Float8Linear` in FP8, each alone.

    Args:
        model: converted by `measuring_policy`; eager. Its gradients are dropped, and its matmuls stand as before in
            the end.
        batches: on the model's device. Two at least, for a standard error.
        advance: called with the passes done so far.

    Raises:
        NumericsError: the loss or a gradient in FP32 is not finite: these weights tell nothing.
    """
    units = group_layers(model)
    tried: dict[tuple[str, str], list[tuple[float, Compared, GradientChange]]] = {}
    losses, done = [], 0
    with all_in(model, BASE) as layers:
        units = facts(layers, units, lambda: one_pass(model, batches[0]))
        for batch in batches:
            base_loss = one_pass(model, batch)
            base = GradientTally(model)
            _check_finite(base_loss, base)
            losses.append(base_loss)
            for unit, gemm, own, loss, tally in _tries(model, layers, units, batch, base):
                tried.setdefault((unit.name, gemm), []).append((loss / base_loss - 1, tally, tally.change(own)))
                if gemm != "wgrad" or unit is units[-1]:
                    done += 1
                    advance(done)
            done += 1
            advance(done)
    switches = [_switch(*matmul, found) for matmul, found in tried.items()]
    return Sensitivity(tuple(units), tuple(switches), tuple(losses))


def measure_policy(model: TrainableModel, batches: Sequence[Batch], formats: Mapping[str, Gemms]) -> PolicyChange:
    """Measure the sensitivity to a whole policy: change against FP32, on other batches than it was chosen by.

    Args:
        model: as for `measure`.
        batches: on the model's device.
        formats: of the layers' matmuls, by layer name; layers left out stay in FP32.
    """
    loss_changes, changes = [], []
    with all_in(model, BASE) as layers:
        for batch in batches:
            base_loss = one_pass(model, batch)
            base = GradientTally(model)
            _check_finite(base_loss, base)
            for name, gemms in formats.items():
                set_formats(layers[name], gemms)
            loss_changes.append(one_pass(model, batch) / base_loss - 1)
            changes.append(base.against(model))
            for name in formats:
                set_formats(layers[name], BASE)
    return PolicyChange(tuple(loss_changes), tuple(c.change() for c in changes), lost_by_batch(changes))


@contextmanager
def all_in(model: nn.Module, gemms: Gemms):
    """Put all switchable layers in one format inside the context, to measure sensitivity; yields them by name, and
    restores their formats."""
    layers = float8_layers(model)
    before = {name: layer.gemms for name, layer in layers.items()}
    try:
        _set_all(model, layers, dict.fromkeys(layers, gemms))
        yield layers
    finally:
        _set_all(model, layers, before)
        model.zero_grad(set_to_none=True)


def set_formats(layer: Float8Linear, gemms: Gemms) -> None:
    """Set the formats of a layer's matmuls for sensitivity; the kind of scale stays."""
    layer.set_gemms(gemms, power_of_two=layer.power_of_two)


def one_pass(model: TrainableModel, batch: Batch) -> float:
    """Run one pass to measure sensitivity: mean loss of a batch, in nats per target; its gradient is in `param.grad`.
    Draws the same dropout each time."""
    model.zero_grad(set_to_none=True)
    devices = [batch["labels"].device] if batch["labels"].is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        output = model.loss(batch)
        loss = output.loss_sum / output.count.clamp(min=1)
        loss.backward()
    return float(loss.detach())


def _set_all(model: nn.Module, layers: Mapping[str, Float8Linear], formats: Mapping[str, Gemms]) -> None:
    for name, layer in layers.items():
        set_formats(layer, formats[name])
    share_inputs(model)
    group_experts(model)


def _tries(model, layers, units, batch, base):
    """Tries for sensitivity: (unit, matmul, own weights, loss, tally of gradients) of every switch on one batch, one
    after the other."""
    own = {unit.name: [f"{name}.weight" for name in unit.layers] for unit in units}
    for gemm in ("fprop", "dgrad"):
        for unit in units:
            for name in unit.layers:
                set_formats(layers[name], BASE.changed({gemm: "fp8_tile"}))
            loss = one_pass(model, batch)
            yield unit, gemm, own[unit.name], loss, base.against(model)
            for name in unit.layers:
                set_formats(layers[name], BASE)
    for layer in layers.values():
        set_formats(layer, BASE.changed({"wgrad": "fp8_tile"}))
    loss = one_pass(model, batch)
    together = base.against(model)
    for unit in units:
        yield unit, "wgrad", own[unit.name], loss, together.only(own[unit.name])
    for layer in layers.values():
        set_formats(layer, BASE)


def _switch(unit: str, gemm: str, found: Sequence[tuple[float, Compared, GradientChange]]) -> FormatSwitch:
    loss_changes, changes, own = zip(*found, strict=True)
    return FormatSwitch(
        unit, gemm, loss_changes, tuple(change.change() for change in changes), own, lost_by_batch(changes)
    )


def _check_finite(loss: float, base: GradientTally) -> None:
    if math.isfinite(loss) and base.finite:
        return
    raise NumericsError(
        "Loss or gradient of these weights is not finite in FP32",
        got=f"loss {loss:.6g}, gradient {'finite' if base.finite else 'not finite'}",
        need="weights of a healthy run",
        try_="--run RUN with a checkpoint from before the trouble, or optim.lr lower",
    )
