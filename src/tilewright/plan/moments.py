"""The moments of a step at which memory may peak, as the solver's phases: for a setting, before any layer's choice.

Every phase that may hold the most is there, so that a peak that moves (from the loss to the end of backward as models
grow deeper, from activations to gradients) is caught by the solver and not by the run. Called by `plan.joint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.plan.classes import LayerClass, ModelShape
from tilewright.plan.fixed import Fixed
from tilewright.plan.footprint import (
    COMPILER_BYTES,
    CUDA_RESERVE_BYTES,
    LOSS_CHUNKS,
    PROCESS_BYTES,
    TRANSFORMERS_BYTES,
    TRITON_BYTES,
)
from tilewright.plan.options import Links, Setting, state_bytes
from tilewright.plan.solve import Phase

HOST_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process that trains on a GPU: libraries, data, pinned buffers (guess)."""
FRAGMENTS = 0.02
"""Share of the device's budget that its allocator cannot hand out in one piece (guess; GPUs only)."""


@dataclass(frozen=True)
class Base:
    """Bytes that no choice of a layer changes."""

    process: float
    stream: float
    """Residual stream, or its gradient, between head and layers."""
    head_kept: float
    head_gradient: float
    loss_work: float
    state: float
    """Parameters and states, wherever they lie."""

    @classmethod
    def of(cls, shape: ModelShape, setting: Setting, recipe: Recipe, machine: Machine) -> "Base":
        """The bytes of a setting."""
        cpu = machine.device == "cpu"
        tokens = setting.micro_batch * shape.seq_len
        head = shape.vocab_size * shape.dim
        stream = float(tokens * shape.dim * shape.stream_bytes)
        if setting.executor == "layer_major":
            stream *= setting.num_micro
        logits = tokens * shape.vocab_size * shape.product_bytes
        blocks = LOSS_CHUNKS[shape.compiled, shape.product_bytes] if cpu else 2.0
        copy = shape.product_bytes * head if shape.stored_bytes > shape.product_bytes else 0
        layers = sum(found.count * found.num_parameters for found in shape.classes)
        ends = shape.embedding_parameters + shape.head_parameters
        stored = shape.stored_bytes * (layers + ends) + state_bytes(layers + ends, setting, shape.stored_bytes)
        return cls(
            process=_process(shape, machine) if cpu else CUDA_RESERVE_BYTES,
            stream=stream,
            head_kept=float(tokens * shape.dim * (8 + shape.product_bytes)),
            head_gradient=4.0 * head,
            loss_work=blocks * min(setting.loss_tile, logits) + copy,
            state=stored,
        )


def _process(shape: ModelShape, machine: Machine) -> float:
    triton = TRITON_BYTES if machine.versions.get("triton") else 0
    compiler = COMPILER_BYTES if shape.compiled else 0
    return PROCESS_BYTES + triton + compiler + (0 if shape.family == "tilewright decoder" else TRANSFORMERS_BYTES)


def stages(classes: Sequence[LayerClass]) -> list[list[str]]:
    """Names of classes in the order in which backward reaches them; classes that take turns go together."""
    ordered = sorted(classes, key=lambda found: -max(found.indices))
    found: list[list[str]] = []
    lowest = 0
    for one in ordered:
        if found and max(one.indices) > lowest:
            found[-1].append(one.name)
            lowest = min(lowest, *one.indices)
        else:
            found.append([one.name])
            lowest = min(one.indices)
    return found


def journal_bytes(base: Base, setting: Setting, recipe: Recipe) -> float:
    """Bytes of what undoes a step that was applied half-way: all that a step changes, once more."""
    kept = recipe.optim.clip == "lagged" and recipe.memory.undo == "journal"
    return base.state if setting.executor == "layer_major" and kept else 0.0


def host_base(base: Base, setting: Setting, recipe: Recipe, links: Links) -> dict[str, float]:
    """Bytes of the host that no choice changes, by owner: the process, the copy that a background checkpoint writes
    from, and the journal, where there is no disk tier."""
    copied = setting.executor == "standard" and recipe.save.background
    journal = journal_bytes(base, setting, recipe) if links.disk is None else 0.0
    return {"process": float(HOST_PROCESS_BYTES), "checkpoint": base.state if copied else 0.0, "journal": journal}


def phases(
    shape: ModelShape,
    setting: Setting,
    recipe: Recipe,
    machine: Machine,
    ends: frozenset[str],
    links: Links,
    fixed: Fixed,
) -> list[Phase]:
    """All moments of a step, an evaluation and a checkpoint. `ends`: names of embedding and head."""
    base = Base.of(shape, setting, recipe, machine)
    layers = frozenset(found.name for found in shape.classes)
    if setting.executor == "layer_major":
        cpu, in_memory = machine.device == "cpu", links.disk is None
        process = base.process + (journal_bytes(base, setting, recipe) if cpu and in_memory else 0.0)
        loss = process + 2 * base.stream + base.head_kept + base.head_gradient + base.loss_work
        # What is at home elsewhere is written to a checkpoint slice by slice; else a copy of all is made first.
        stays = in_memory and {fixed.parameters, fixed.states} <= {None, "device"}
        copy = base.state if cpu and stays and recipe.save.background else 0.0
        return [
            Phase("load", base.process),
            Phase("forward", process + base.stream, layers, transient="forward"),
            Phase("loss", loss, layers),
            Phase("backward", process + 2 * base.stream, layers, transient="backward"),
            Phase("checkpoint", process + copy),
        ]
    return _standard(shape, setting, recipe, machine, base, layers, ends)


def _standard(
    shape: ModelShape,
    setting: Setting,
    recipe: Recipe,
    machine: Machine,
    base: Base,
    layers: frozenset[str],
    ends: frozenset[str],
) -> list[Phase]:
    cpu, everything = machine.device == "cpu", layers | ends
    copy = base.state if cpu and recipe.save.background else 0.0
    going_on = copy if 0 < recipe.save.every < recipe.train.steps else 0.0
    process = base.process + going_on
    held = everything if setting.num_micro > 1 else frozenset[str]()
    top = process + base.head_kept + base.head_gradient
    found = [
        Phase("load", base.process),
        Phase("forward", process, layers, held, "forward"),
        Phase("loss", top + base.loss_work, layers, held),
        Phase("backward", top + base.stream, layers, held, "backward"),
    ]
    if setting.num_micro == 1:  # gradients grow while activations go: a moment behind each kind of layers
        order = stages(shape.classes)
        for i, names in enumerate(order):
            below = frozenset(name for stage in order[i + 1 :] for name in stage)
            above = frozenset(name for stage in order[: i + 1] for name in stage) | ends
            where = process + base.stream
            found.append(Phase(f"backward, {' and '.join(names)} done", where, below, above, "backward"))
    # On a CPU the pages of backward's work stay with the process.
    last = Phase("update", process, layers if cpu else frozenset(), everything, "backward" if cpu else "none")
    wide = (4 - shape.stored_bytes) * shape.num_parameters if recipe.precision.eval_fp32 else 0.0
    found.append(last)
    found.append(Phase("evaluate", process + wide + base.loss_work, layers if cpu else frozenset()))
    found.append(Phase("checkpoint", base.process + max(copy, going_on), last.kept, everything, last.transient))
    return found
