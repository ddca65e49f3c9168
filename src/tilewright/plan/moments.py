"""The moments of a step at which memory may peak, as the solver's phases: for a setting, before any layer's choice.

Every phase that may hold the most is there, so that a peak that moves (from the loss to the end of backward as models
grow deeper, from activations to gradients) is caught by the solver and not by the run. Called by `plan.joint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.ops.native.loss import chunk_rows
from tilewright.plan.footprint import CUDA_RESERVE_BYTES, evaluated_loss_bytes, loss_chunks, written_beside
from tilewright.plan.options import Setting, state_bytes
from tilewright.plan.shape import LayerClass, ModelShape
from tilewright.plan.solve import Phase, Transient

HOST_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process that trains on a GPU: libraries, data, pinned buffers (guess)."""
CHECKPOINT = "checkpoint"
"""What names of phases begin with in which one is written."""
FRAGMENTS = 0.02
"""Share of the device's budget that its allocator cannot hand out in one piece (guess; GPUs only)."""


@dataclass(frozen=True)
class Homes:
    """What follows from where parameters and states are at home, before it is decided for each layer.

    `travels`: some are off the device, so a checkpoint is written slice by slice and without a copy of all. `on_disk`:
    some are on disk, and so the journal is.
    """

    travels: bool
    on_disk: bool


@dataclass(frozen=True)
class Base:
    """Bytes that no choice of a layer changes."""

    process: float
    stream: float
    """Residual stream, or its gradient, between head and layers."""
    head_kept: float
    head_gradient: float
    loss_work: float
    evaluated_loss: float
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
        row = shape.vocab_size * shape.logit_bytes
        chunk = chunk_rows(tokens, row, setting.loss_tile) * row
        blocks = loss_chunks(machine, shape.loss_compiled, shape.logit_bytes)
        layers = sum(found.count * found.num_parameters for found in shape.classes)
        ends = shape.embedding_parameters + shape.head_parameters
        stored = shape.stored_bytes * (layers + ends) + state_bytes(layers + ends, setting, shape.stored_bytes)
        return cls(
            process=shape.process_bytes if cpu else CUDA_RESERVE_BYTES,
            stream=stream,
            head_kept=float(tokens * (shape.dim * (8 + shape.logit_bytes) + 4)),
            head_gradient=4.0 * head,
            loss_work=blocks * chunk + shape.logit_bytes * head,
            evaluated_loss=evaluated_loss_bytes(
                tokens,
                shape.dim,
                shape.vocab_size,
                4 if recipe.precision.eval_fp32 else shape.logit_bytes,
                setting.loss_tile,
            ),
            state=stored,
        )


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


def host_base(base: Base, setting: Setting, recipe: Recipe, homes: Homes) -> dict[str, float]:
    """Bytes of the host that no choice changes, by owner: the process, the copy that a background checkpoint writes
    from, and the journal, where no slices are on disk."""
    copied = setting.executor == "standard" and written_beside(recipe)
    journal = journal_bytes(base, setting, recipe) if not homes.on_disk else 0.0
    return {"process": float(HOST_PROCESS_BYTES), "checkpoint": base.state if copied else 0.0, "journal": journal}


def phases(
    shape: ModelShape, setting: Setting, recipe: Recipe, machine: Machine, ends: frozenset[str], homes: Homes
) -> list[Phase]:
    """All moments of a step, an evaluation and a checkpoint. `ends`: names of embedding and head."""
    base = Base.of(shape, setting, recipe, machine)
    layers = frozenset(found.name for found in shape.classes)
    if setting.executor == "layer_major":
        return _layer_major(shape, setting, recipe, machine, base, layers, homes)
    return _standard(shape, setting, recipe, machine, base, layers, ends)


def _layer_major(
    shape: ModelShape,
    setting: Setting,
    recipe: Recipe,
    machine: Machine,
    base: Base,
    layers: frozenset[str],
    homes: Homes,
) -> list[Phase]:
    cpu = machine.device == "cpu"
    process = base.process + (journal_bytes(base, setting, recipe) if cpu and not homes.on_disk else 0.0)
    shared = base.head_gradient if shape.tied else 0.0  # complete only when both ends are through
    loss = process + 2 * base.stream + base.head_kept + base.head_gradient + base.loss_work
    copy = base.state if cpu and not homes.travels and written_beside(recipe) else 0.0
    pages: Transient = "backward" if cpu else "none"  # what the layers' work left
    found = [
        Phase("load", base.process),
        Phase("forward", process + base.stream, layers, transient="backward" if cpu else "forward"),
        Phase("loss", loss, layers, transient=pages),
        Phase("backward", process + 2 * base.stream + shared, layers, transient="backward"),
        Phase("evaluate", process + base.evaluated_loss, layers if cpu else frozenset(), transient=pages),
    ]
    alone = Phase(CHECKPOINT, process, layers if cpu else frozenset(), transient=pages)
    return [*found, *_checkpoints(found, copy, alone)]


def _checkpoints(found: Sequence[Phase], copy: float, alone: Phase) -> list[Phase]:
    """What a checkpoint adds: where it is written from a copy, all moments of training beside that; else one more."""
    if not copy:
        return [alone]
    return [replace(phase, name=f"{CHECKPOINT}, {phase.name}", base=phase.base + copy) for phase in found[1:]]


def _standard(
    shape: ModelShape,
    setting: Setting,
    recipe: Recipe,
    machine: Machine,
    base: Base,
    layers: frozenset[str],
    ends: frozenset[str],
) -> list[Phase]:
    """On a CPU the pages of activations and of backward's work stay with the process, so they are in all phases."""
    cpu, everything = machine.device == "cpu", layers | ends
    copy = base.state if cpu and written_beside(recipe) else 0.0
    process = base.process - len(shape.classes) * shape.kind_bytes  # counted for each way there is (`Cost.once`)
    held = everything if setting.num_micro > 1 else frozenset[str]()
    of_head = base.head_kept + base.head_gradient
    top = process + of_head
    pages: Transient = "backward" if cpu else "none"
    found = [
        Phase("load", process),
        Phase("forward", process, layers, held, "backward" if cpu else "forward"),
        Phase("loss", top + base.loss_work, layers, held, pages),
        Phase("backward", top + base.stream, layers, held, "backward"),
    ]
    if setting.num_micro == 1:  # gradients grow while activations go: a moment behind each kind of layers
        order = stages(shape.classes)
        for i, names in enumerate(order):
            below = frozenset(name for stage in order[i + 1 :] for name in stage)
            above = frozenset(name for stage in order[: i + 1] for name in stage) | ends
            where = process + base.stream
            found.append(Phase(f"backward, {' and '.join(names)} done", where, below, above, "backward"))
    kept, rest = (layers, of_head) if cpu else (frozenset[str](), 0.0)
    wide = (4 - shape.stored_bytes) * shape.num_parameters if recipe.precision.eval_fp32 else 0.0
    found.append(Phase("update", process + rest, kept, everything, pages))
    found.append(Phase("evaluate", process + rest + wide + base.evaluated_loss, kept, transient=pages))
    return [*found, *_checkpoints(found, copy, Phase(CHECKPOINT, process + rest, kept, everything, pages))]
