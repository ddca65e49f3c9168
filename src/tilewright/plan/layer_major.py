"""Bytes of a layer-major run by owner at each phase: what lies in which tier, and what one slice needs.

    parameters   in their tier; off the device `prefetch + 1` staging buffers of the largest slice
    optimizer    the same
    gradients    FP32, of the largest slice; of parameters that several slices read through the whole backward pass
    activations  the inputs of all slices for all micro-batches, in their tier; in backward one slice's own besides
    other        process, work and kept pages as in `footprint`; the journal

On a CPU device and host are one memory. Traffic between tiers is not in the plan's seconds. Called by `footprint`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.core.config import Tier
from tilewright.models.activation_bytes import FP32, TILE, head_bytes, layer_bytes, tile_bytes, weight_copy_bytes
from tilewright.plan import footprint as standard
from tilewright.plan.workload import BYTES, Workload


@dataclass(frozen=True)
class SliceSizes:
    """Parameters (elements) of a model cut into slices."""

    largest: int
    shared: int
    """Read by several slices, as a head tied to the embedding: always on the device."""
    num_groups: int


def slice_sizes(work: Workload) -> SliceSizes:
    """The slices of a recipe's model. What stands around the layers is two slices, or one that both ends share."""
    group = work.recipe.memory.group
    layers = work.layer_parameters
    groups = [sum(layers[first : first + group]) for first in range(0, len(layers), group)]
    outer = work.num_parameters - sum(layers)
    tied = len(work.outer_weights) < 2
    ends = [0] if tied else sorted(work.outer_weights)[-2:]
    return SliceSizes(max([*groups, *ends]), outer if tied else 0, len(groups))


def layer_major_footprint(work: Workload) -> standard.Footprint:
    """The bytes of a run; where it passes through several precision modes, the larger ones."""
    memory, cpu, sizes = work.recipe.memory, work.machine.device == "cpu", slice_sizes(work)
    states = standard.optimizer_bytes(work)
    held = {
        "parameters": _on_device(work.parameter_bytes, work.num_parameters, sizes, memory.parameters, work),
        "optimizer": _on_device(states, work.num_parameters, sizes, memory.states, work),
        "buffers": standard.buffer_bytes(work),
    }
    gradients = 4 * (sizes.largest + sizes.shared) * work.num_trainable // work.num_parameters
    inputs = _input_bytes(work, sizes)
    own = max(_slice_activations(work, mode) for mode in work.modes)
    head = max(_head_activations(work, mode) for mode in work.modes)
    layer_work = max(standard.layer_work(work, mode) for mode in work.modes) * memory.group
    loss_work = max(standard.loss_work(work, mode) for mode in work.modes)
    process = standard.process_bytes(work) if cpu else 0
    kept = layer_work + own if cpu else 0  # a slice that was recomputed leaves its own, too
    journal = work.parameter_bytes + states if _keeps_journal(work) and cpu else 0
    base = process + journal
    layers = {"activations": inputs + own, "other": base + layer_work}
    loss = {"activations": inputs + head, "other": base + kept + loss_work}  # too large for the pages that are kept
    phases: dict[str, Mapping[str, int]] = {
        "load": {"parameters": held["parameters"], "optimizer": held["optimizer"], "other": process},
        "forward": held | {"activations": inputs, "other": base + kept},
        "backward": held | {"gradients": gradients} | max(layers, loss, key=lambda owners: sum(owners.values())),
        "update": held | {"gradients": gradients, "activations": inputs, "other": base + kept},
        # On a CPU the pages of the inputs stay, too.
        "evaluate": held | {"other": base + kept + (inputs if cpu else 0) + standard.evaluated_loss_work(work)},
    }
    if memory.parameters == memory.states == "device":
        phases["checkpoint"] = standard.checkpoint_phase(work, phases, held["parameters"] + held["optimizer"])
    else:
        phases["checkpoint"] = phases["update"]  # written slice by slice while training stands still
    parts = {"process": process, "work": max(layer_work, kept + loss_work), "journal": journal}
    return standard.Footprint(phases, parts, 0 if cpu else standard.CUDA_RESERVE_BYTES)


def _on_device(num_bytes: int, num_parameters: int, sizes: SliceSizes, tier: Tier, work: Workload) -> int:
    """Bytes on the device of what is at home in `tier`; it is spread over slices as parameters are."""
    if tier == "device":
        return num_bytes
    resident = num_bytes * sizes.shared // num_parameters
    staging = (work.recipe.memory.prefetch + 1) * num_bytes * sizes.largest // num_parameters
    at_home = num_bytes - resident if tier == "host" and work.machine.device == "cpu" else 0
    return resident + staging + at_home


def _input_bytes(work: Workload, sizes: SliceSizes) -> int:
    """Bytes on the device of the inputs of all slices and of the head, for all micro-batches of a step."""
    stream = BYTES[work.policies[work.modes[-1]].stream]
    exact = work.num_tokens * work.width * stream
    coded = work.num_tokens * (work.width + FP32 * -(-work.width // TILE))
    each = coded if work.recipe.train.checkpoint_inputs == "fp8" else exact
    tier = work.recipe.memory.inputs
    if tier == "device" or (tier == "host" and work.machine.device == "cpu"):
        return work.num_micro * (sizes.num_groups * each + exact)
    return 3 * exact + work.num_micro * exact  # two on their way and one in use; outputs of the slice that runs


def _slice_activations(work: Workload, mode: str) -> int:
    """What one slice keeps for backward of one micro-batch."""
    group = work.recipe.memory.group
    if work.config is None:
        return group * work.layer_kept
    config, tokens = work.config, work.num_tokens
    stored = BYTES[work.policies[mode].storage]
    layers = [
        layer_bytes(config, i, "none", kept) * tokens
        + tile_bytes(config, i, "none", kept, tokens)
        + weight_copy_bytes(config, i, "none", kept, stored)
        for i, kept in enumerate(standard.layer_storages(work, mode))
    ]
    return max(sum(layers[first : first + group]) for first in range(0, len(layers), group))


def _head_activations(work: Workload, mode: str) -> int:
    """What the head keeps for backward of one micro-batch."""
    if work.config is not None:
        return head_bytes(work.config, work.num_tokens, standard.storage(work, mode))
    return work.num_tokens * work.width * BYTES[work.policies[mode].activation]


def _keeps_journal(work: Workload) -> bool:
    """Whether what undoes a step, as many bytes again as parameters and states, is in host memory."""
    memory = work.recipe.memory
    wanted = work.recipe.optim.clip == "lagged" and memory.undo == "journal"
    return wanted and "disk" not in (memory.parameters, memory.states)
