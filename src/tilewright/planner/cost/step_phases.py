"""The phases of a step at which memory may peak, for the solver: for a setting, before any layer's choice.

Every phase that may hold the most is there, so that a peak that moves (from the loss to the end of backward as models
grow deeper, from activations to gradients) is caught by the solver and not by the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.ops.backends.native.loss import chunk_rows
from tilewright.planner.cost.layer_choices import GlobalConfig, state_bytes, update_bytes
from tilewright.planner.cost.rank_share import Gathered
from tilewright.planner.cost.solve_layers import Phase, Transient
from tilewright.planner.cost.teacher_cost import forward_bytes, held_bytes, loss_bytes
from tilewright.planner.machine.process_bytes import CUDA_RESERVE_BYTES, chunk_bytes, evaluated_loss_bytes
from tilewright.planner.model.model_shape import LayerClass, ModelShape

FEEDBACK_BYTES = 2
"""Per trained parameter of the whole model (`parallel.communicate.feedback`)."""
HOST_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process that trains on a GPU: libraries, data, pinned buffers (guess)."""
TEACHER = "forward, teacher"
EVALUATE, CHECKPOINT = "evaluate", "checkpoint"
"""What names of phases begin with in which a model is evaluated, or a checkpoint is written."""
FRAGMENTS = 0.02
"""Share of the device's budget that its allocator cannot hand out in one piece (guess; GPUs only)."""


@dataclass(frozen=True)
class OffloadFlags:
    """Consequences of where parameters and states are stored, before it is decided for each layer.

    `is_offloaded`: some are off the device, so a checkpoint is written layer group by layer group and without a copy of
    all. `on_disk`: some are on disk, and so the rollback buffer is."""

    is_offloaded: bool
    on_disk: bool


@dataclass(frozen=True)
class FixedBytes:
    """Bytes that no choice of a layer changes."""

    process: float
    """Of the process itself, and of the teacher of `[distill]`."""
    stream: float
    """Residual stream, or its gradient, between head and layers."""
    head_kept: float
    """What is around the layers keeps for backward."""
    head_gradient: float
    """Of a plain head: complete when the forward pass ends."""
    loss_work: float
    evaluated_loss: float
    state: float
    """Parameters and states of this rank, wherever they lie."""

    @classmethod
    def of(cls, shape: ModelShape, setting: GlobalConfig, recipe: Recipe, machine: Machine) -> "FixedBytes":
        """The bytes of a setting in every phase that no choice of a layer changes."""
        rows = setting.micro_batch_size
        stream = float(rows * shape.seq_len * shape.dim * shape.stream_bytes)
        if not setting.can.one_micro_batch:
            stream *= setting.num_micro
        part = shape.weights.part(setting.shards.count)
        size = 4 if recipe.precision.eval_fp32 else shape.logit_bytes
        if shape.plain_head:
            tokens, head = rows * shape.seq_len, shape.vocab_size * shape.dim
            row = shape.vocab_size * shape.logit_bytes
            chunk = chunk_rows(tokens, row, setting.loss_chunk_bytes) * row
            loss = chunk_bytes(machine, shape.loss_compiled, shape.logit_bytes, chunk) + shape.logit_bytes * head
            if shape.teacher is not None:
                loss = loss_bytes(shape, tokens, setting.loss_chunk_bytes, on_cpu=machine.device == "cpu")
            evaluated = evaluated_loss_bytes(tokens, shape.dim, shape.vocab_size, size, setting.loss_chunk_bytes)
            frozen = recipe.lora.rank and not recipe.lora.modules_to_save  # under adapters alone
            gradient = 0.0 if frozen else 4.0 * head
        else:  # all logits are there at once; the gradient of the head's weight is among them
            loss, gradient = shape.rest.work(rows), 0.0
            evaluated = loss * size / shape.logit_bytes
        tokens = setting.num_micro * rows * shape.seq_len
        return cls(
            process=(shape.process_bytes if machine.device == "cpu" else CUDA_RESERVE_BYTES)
            + held_bytes(shape, tokens, rows * shape.seq_len),
            stream=stream,
            head_kept=shape.rest.kept(rows),
            head_gradient=gradient,
            loss_work=loss,
            evaluated_loss=evaluated,
            state=part.stored + state_bytes(part, setting),
        )


def written_beside(recipe: Recipe) -> bool:
    """True if a phase is needed in which checkpoints are written from a copy while training continues. The last one
    never is: nothing follows it."""
    section, steps = recipe.checkpoint, recipe.train.steps or math.inf  # 0: as many as fit
    return section.async_save and (section.interval_minutes > 0 or 0 < section.interval < steps)


def stages(classes: Sequence[LayerClass]) -> list[list[str]]:
    """Names of classes in the order in which the phases of backward reach them; classes that take turns go together."""
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


def rollback_bytes(base: FixedBytes, setting: GlobalConfig, recipe: Recipe) -> float:
    """Bytes in all phases of what undoes a step that was applied half-way: all that a step changes, once more."""
    kept = recipe.optim.clip == "delayed" and recipe.memory.rollback == "buffer"
    return base.state if kept and not setting.can.whole_gradient else 0.0


def host_base(base: FixedBytes, setting: GlobalConfig, recipe: Recipe, homes: OffloadFlags) -> dict[str, float]:
    """Bytes of the host in all phases that no choice changes, by owner: the process, the copy that a background
    checkpoint writes from, and the rollback buffer, where no layer groups are on disk."""
    copied = not setting.can.offload and written_beside(recipe)
    rollback = rollback_bytes(base, setting, recipe) if not homes.on_disk else 0.0
    return {"process": float(HOST_PROCESS_BYTES), "checkpoint": base.state if copied else 0.0, "journal": rollback}


def phases(
    shape: ModelShape,
    setting: GlobalConfig,
    recipe: Recipe,
    machine: Machine,
    ends: frozenset[str],
    homes: OffloadFlags,
) -> list[Phase]:
    """All phases of a step, an evaluation and a checkpoint. `ends`: names of embedding and head."""
    base = FixedBytes.of(shape, setting, recipe, machine)
    layers = frozenset(found.name for found in shape.classes)
    if not setting.can.one_micro_batch:
        return _layer_major(shape, setting, recipe, machine, base, layers, homes)
    found = _standard(shape, setting, recipe, machine, base, layers, ends)
    return _owing(found, FEEDBACK_BYTES * shape.weights.trained) if setting.shards.feedback else found


def _owing(found: Sequence[Phase], owed: float) -> list[Phase]:
    """Add the error feedback of a wire format to the phases: once always, and once more from backward to the update."""

    def more(phase: Phase) -> float:
        return 0.0 if phase.name == "load" else owed * (2 if phase.name.startswith(("backward", "update")) else 1)

    return [
        replace(phase, owners={**phase.owners, "gradients": phase.owners.get("gradients", 0.0) + more(phase)})
        for phase in found
    ]


def _layer_major(
    shape: ModelShape,
    setting: GlobalConfig,
    recipe: Recipe,
    machine: Machine,
    base: FixedBytes,
    layers: frozenset[str],
    homes: OffloadFlags,
) -> list[Phase]:
    cpu = machine.device == "cpu"
    always = {"process": base.process}
    always["journal"] = rollback_bytes(base, setting, recipe) if cpu and not homes.on_disk else 0.0
    stream = {"activations": base.stream}  # the last layer's output waits for the head
    shared = {"gradients": base.head_gradient if shape.tied else 0.0}  # complete only when both ends are through
    head = {"activations": base.stream + base.head_kept, "gradients": base.head_gradient}
    copy = base.state if cpu and not homes.is_offloaded and written_beside(recipe) else 0.0
    pages: Transient = "backward" if cpu else "none"  # what the layers' work left
    left = layers if cpu else frozenset[str]()
    found = [
        Phase("load", {"process": base.process}),
        *_taught(shape, setting, always),
        Phase("forward", always | stream, layers, transient="backward" if cpu else "forward"),
        Phase("loss", always | head | {"work": base.stream + base.loss_work}, layers, transient=pages, passed=True),
        Phase("backward", always | stream | shared | {"work": base.stream}, layers, transient="backward"),
        Phase(EVALUATE, always | {"work": base.evaluated_loss}, left, transient=pages, passed=True, freed=True),
    ]
    return [
        *found,
        *_checkpoints(found, copy, Phase(CHECKPOINT, always, left, transient=pages, passed=True, freed=True)),
    ]


def _checkpoints(found: Sequence[Phase], copy: float, alone: Phase) -> list[Phase]:
    """Add the bytes of a checkpoint to the phases: to all phases of training if it is written from a copy, else as a
    phase of its own."""
    return _beside(CHECKPOINT, found[1:], {"copy": copy}) if copy else [alone]


def _beside(name: str, found: Sequence[Phase], more: Mapping[str, float]) -> list[Phase]:
    """The same phases of a step with something added."""
    return [replace(phase, name=f"{name}, {phase.name}", owners={**phase.owners, **more}) for phase in found]


def _standard(
    shape: ModelShape,
    setting: GlobalConfig,
    recipe: Recipe,
    machine: Machine,
    base: FixedBytes,
    layers: frozenset[str],
    ends: frozenset[str],
) -> list[Phase]:
    """Phases of a standard step. On a CPU the pages of activations and of backward's work stay with the process, so
    they are in all phases."""
    cpu, everything = machine.device == "cpu", layers | ends
    copy = base.state if cpu and written_beside(recipe) else 0.0
    code = len(shape.classes) * shape.kind_bytes  # counted for each way there is (`Cost.once`)
    always = {"process": base.process - code, "buffers": shape.rest.buffers}
    many = setting.num_micro > 1 or setting.shards.staged
    gathered = Gathered(shape, setting.shards, setting.num_micro)
    held = everything if many else frozenset[str]()
    passes = always | {"parameters": gathered.rest + gathered.layers(layers), "gradients": gathered.gradients}
    head = {"activations": base.head_kept + base.head_gradient}
    gaps = {"gaps": shape.spread * sum(head.values())}
    stream = {"work": (1 + shape.spread) * base.stream}
    loss = {"work": (1 + shape.spread) * base.loss_work, "gathering": gathered.largest}
    pages: Transient = "backward" if cpu else "none"
    # Elsewhere the head's activations are gone as layers run backward, and its gradient is where others are added up.
    behind = head if cpu else {"activations": 0.0 if many else base.head_gradient}
    early, first = (
        (ends, gathered.rest_gradients) if cpu or shape.tied else (frozenset(["head"]), gathered.head_gradients)
    )
    cut = setting.shards.cut
    read = {"work": shape.weights.stored - shape.weights.part(setting.shards.count).stored if recipe.lora.rank else 0.0}
    found = [
        Phase("load", {"process": base.process - code} | read),  # a base under adapters is read whole, then cut
        *_taught(shape, setting, always),
        Phase("forward", passes, layers, held, "backward" if cpu else "forward"),
        Phase("loss", passes | head | gaps | loss, layers, held, pages, passed=True),
        Phase("backward", passes | behind | gaps | stream, layers, held, "backward"),
    ]
    if not many and not shape.classes:
        whole = {"work": (1 + shape.spread) * shape.backward(setting.micro_batch_size)}
        found.append(Phase("backward, done", passes | whole))
    elif not many:  # gradients grow while activations go: a phase behind each kind of layers
        order = stages(shape.classes)
        for i, names in enumerate(order):
            below = frozenset(name for stage in order[i + 1 :] for name in stage)
            above = frozenset(name for stage in order[: i + 1] for name in stage) | early
            whole = {"parameters": gathered.rest + gathered.layers(below), "gradients": first}
            name = f"backward, {' and '.join(names)} done"
            found.append(Phase(name, always | stream | whole, below, above, "backward"))
    if cut:  # the last gradients that are whole
        reduced = {"gradients": gathered.rest_gradients, "work": gathered.rest_reduced}
        found.append(Phase("backward, embedding and head reduced", always | reduced, gradients=everything))
    takes = update_bytes(shape.weights, setting, shape)
    if takes and (cpu or not setting.shards.offload):  # on a CPU in the pages that others left, if they are so many
        found.append(Phase("update, largest matrix", always | {"work": takes}, gradients=everything))
    put_together = replace(gathered, wide=recipe.precision.eval_fp32)
    evaluated = {"parameters": _evaluated(put_together, recipe), "loss": base.evaluated_loss}
    evaluated["gathering"] = 0.0 if cpu else 2 * put_together.largest
    if cpu and shape.spread:  # all pages of the busiest phase stay: an update finds room in them
        evaluations = _beside(EVALUATE, found[1:], evaluated)
        return [*found, *evaluations, *_beside(CHECKPOINT, [*found[1:], *evaluations], {"copy": copy})]
    left, freed = (layers, sum(head.values())) if cpu else (frozenset[str](), 0.0)
    update = Phase("update", always | {"work": freed}, left, everything, pages, passed=True, freed=True)
    found += [
        update,
        Phase(EVALUATE, always | evaluated | {"work": freed}, left, transient=pages, passed=True, freed=True),
    ]
    return [*found, *_checkpoints(found, copy, replace(update, name=CHECKPOINT))]


def _taught(shape: ModelShape, setting: GlobalConfig, always: Mapping[str, float]) -> list[Phase]:
    """The phase of a teacher's forward pass, before that of its student: nothing of the student is kept then."""
    if shape.teacher is None or not shape.teacher.runs:
        return []
    return [Phase(TEACHER, {**always, "work": forward_bytes(shape, setting.micro_batch_size)})]


def _evaluated(gathered: Gathered, recipe: Recipe) -> float:
    """The phase of an evaluation: additional parameters, in FP32 where they are stored in 16 bits, and gathered."""
    shape, together = gathered.shape, gathered.rest + gathered.layers([found.name for found in gathered.shape.classes])
    if not recipe.precision.eval_fp32:
        return together
    whole, part = shape.weights, shape.weights.part(gathered.shards.count)
    return 2.0 * part.narrow + together * (1 + 2.0 * whole.narrow / whole.stored)
