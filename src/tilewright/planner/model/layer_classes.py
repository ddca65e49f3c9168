"""Layer classes of a model: layers of equal structure, measured once, however many there are.

A model of 671 billion parameters has a dozen kinds of matrices. Its layers are sorted by structure, one of each class
is measured (`foreign_shape`, or the decoder's own formulas in `decoder_shape`), and `planner.cost.solve_layers` decides
how many of each class are treated how. Everything is a straight line in the rows of a micro-batch. No weights, no GPU.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.hardware import Machine
from tilewright.core.units import format_bytes
from tilewright.models.distill.hidden import pairs_of
from tilewright.models.distill.kept_tokens import handed_on_bytes
from tilewright.models.teacher_folder import TeacherFolder, all_rows_are_kept, find_teacher
from tilewright.planner.model.decoder_shape import decoder_shape
from tilewright.planner.model.hf_shape import foreign_shape, trace_twice
from tilewright.planner.model.model_shape import ModelShape, TeacherShape
from tilewright.planner.model.skeleton import Skeleton, check_checkpointing, skeleton_of
from tilewright.planner.trace.model_trace import ModelCalls, Trace
from tilewright.precision.policy.policy import Policy, in_fp32
from tilewright.precision.policy.schedule import ModeSchedule

FP32 = 4
PROJECTION_BYTES = 4 * FP32
"""Per element: value, gradient and two moments."""
EACH_BYTES = 3 * FP32 + 1
"""Per token and pair: squared distance, squared length, loss, and whether it is a target."""


def teacher_weights(skeleton: Skeleton, pp: int = 1) -> float:
    """Bytes of a frozen teacher in FP32, all weights and buffers of its skeleton. For so many ranks in a row it is a
    bound on the fullest one: the largest layers, and both ends."""
    size = sum(tensor.nbytes for tensor in (*skeleton.model.parameters(), *skeleton.model.buffers()))
    layers: list[int] = []
    for layer, indices in zip(skeleton.layers, skeleton.indices, strict=True):
        one = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
        size, layers = size - one, layers + [one] * len(indices)
    return float(size + sum(sorted(layers, reverse=True)[: -(-len(layers) // pp)]))


def teacher_recipe(recipe: Recipe, found: TeacherFolder) -> Recipe:
    """The recipe of a teacher as it runs beside a student: eager, forward alone, on the student's rows."""
    train = recipe.train.model_copy(update={"compile": "off", "activation_checkpoint": "none"})
    memory = recipe.memory.model_copy(update={"executor": "standard"})
    alone = recipe.parallel.model_copy(update={"tp": 1, "ep": 1})  # whole on each process
    sections = {"train": train, "memory": memory, "parallel": alone, "distill": DistillSection()}
    return recipe.model_copy(update={"model": found.model, "lora": found.lora, **sections})


class ShapeFinder:
    """Finds shapes of one model in several settings; keeps the meta model, and what was traced, between them.

    Args:
        vocab_size: of the tokenizer; classes of an image folder.
        machine: where it would run.
        attention_share: of the pairs of positions in full rows, how many whole documents of the data have; None: as
            many, a bound.
    """

    def __init__(self, vocab_size: int, machine: Machine, attention_share: float | None = None) -> None:
        self.vocab_size = vocab_size
        self.machine = machine
        self.attention_share = attention_share
        self._skeletons: dict[object, Skeleton] = {}
        self._traces: dict[object, tuple[Trace, Trace] | str] = {}
        self._calls: dict[ModelSection, ModelCalls] = {}
        self._teachers: dict[object, TeacherShape] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state of a finder of layer classes that other processes get: traces. They make the models, with their
        hooks, themselves."""
        return vars(self) | {"_skeletons": {}}

    def find(self, recipe: Recipe) -> ModelShape:
        """The layer classes of a recipe's model, as its shape: seconds of the precision mode that it ends in, and bytes
        of the widest mode that it passes through; with its teacher.

        Raises:
            ConfigError: the model or its teacher cannot be built, or cannot do what the recipe says.
            CheckpointError: its folder cannot be read.
        """
        schedule = ModeSchedule.from_section(recipe.precision, recipe.train.steps)
        modes = dict.fromkeys(mode for mode in (schedule.mode, schedule.start_mode) if mode)
        parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
        policy = Policy.from_section(recipe.precision, self.machine.device, parameters=parameters)
        found = reduce(ModelShape.covering, (self._in_mode(recipe, policy.in_mode(mode), mode) for mode in modes))
        if recipe.data.rows == "documents":
            found = replace(found, attention_share=self.attention_share)
        return self._taught(found, recipe) if recipe.distill.teacher else found

    def _taught(self, found: ModelShape, recipe: Recipe) -> ModelShape:
        """The layer classes of a model that learns from a teacher, as its shape."""
        name, pp, kept = recipe.distill.teacher, recipe.parallel.pp, all_rows_are_kept(recipe)
        key = (
            recipe.distill.model_dump_json(),
            kept,
            recipe.data.seq_len,
            recipe.ops,
            found.matmul_format == "bf16",
            pp,
        )
        if key not in self._teachers:
            self._teachers[key] = self._teacher(recipe, bf16=found.matmul_format == "bf16")
        teacher = _with_pairs(self._teachers[key], recipe.distill, found.dim, found.stream_bytes)
        if kept:
            note = (
                f"{recipe.distill.cache} has all rows of this run: the teacher {name} is in neither bytes nor seconds"
            )
            return replace(found, teacher=replace(teacher, runs=False), notes=(*found.notes, note))
        notes = (
            *found.notes,
            f"the teacher {name} is {'in stages too' if pp > 1 else 'whole on each process'}: "
            f"{format_bytes(teacher.weights)} on the device, counted as the process's",
        )
        if recipe.distill.cache:
            notes += (
                f"bytes and seconds are those of rows that {recipe.distill.cache} does not have; a row that it has "
                "costs no forward pass of the teacher",
            )
        if teacher.model.unknown:
            notes += (f"the teacher's forward pass is in neither bytes nor seconds: {teacher.model.unknown}",)
        if recipe.parallel.tp > 1:  # rows of the head, which is cut, are put together for the loss
            whole = teacher.model.vocab_size
            head = float(found.matmul_bytes * whole * found.dim)
            found, teacher = replace(found, vocab_size=whole), replace(teacher, weights=teacher.weights + head)
        return replace(found, teacher=teacher, notes=notes)

    def _teacher(self, recipe: Recipe, *, bf16: bool) -> TeacherShape:
        """The recipe of the teacher, for its layer classes: it computes in BF16 where the student does, else in
        FP32."""
        found, device = find_teacher(recipe.distill.teacher), self.machine.device
        own = () if found.run is None else in_fp32(Policy.from_section(found.run.precision, device)).rules
        policy = Policy("bf16_mixed" if bf16 else "fp32", own, device_type=device)
        beside = teacher_recipe(recipe, found)
        model = self._in_mode(beside, policy, policy.mode)
        section, weights = recipe.distill, teacher_weights(self._skeleton(beside), recipe.parallel.pp)
        top_k = min(section.cache_top_k, self.vocab_size - 1) if section.cache else 0
        hidden = handed_on_bytes(top_k) if top_k else model.dim * model.stream_bytes
        hidden += len(pairs_of(section)) * model.dim * model.stream_bytes
        return TeacherShape(model, weights, float(hidden), section.divergence, section.temperature, top_k)

    def _in_mode(self, recipe: Recipe, policy: Policy, mode: str) -> ModelShape:
        skeleton = self._skeleton(recipe)
        if skeleton.config is not None:
            return decoder_shape(skeleton, recipe, policy, self.machine)
        train = recipe.train
        kept = () if skeleton.names else (train.activation_checkpoint, train.checkpoint_inputs)
        sizes = (recipe.data.seq_len, recipe.data.image_size, *_cuts(recipe))
        key = (recipe.model, recipe.lora, recipe.precision, recipe.optim.master_weights != "fp32", mode, sizes, kept)
        if key not in self._traces:  # seconds for a large model, and most settings change nothing of it
            calls = self._calls.setdefault(recipe.model, ModelCalls())
            self._traces[key] = trace_twice(skeleton, recipe, policy, self.machine, calls)
        return foreign_shape(skeleton, recipe, policy, self.machine, self._traces[key])

    def _skeleton(self, recipe: Recipe) -> Skeleton:
        alike = (recipe.model, recipe.lora, *_cuts(recipe))
        own = (*alike, recipe.memory.executor)
        found = self._skeletons.get(alike) or self._skeletons.get(own)
        if found is None:
            found = skeleton_of(recipe, self.vocab_size)
            self._skeletons[alike if found.serves_all else own] = found
        check_checkpointing(found, recipe)
        return found


def _cuts(recipe: Recipe) -> tuple[int, int]:
    """The numbers that decide the shapes of the parts of matrices that a rank has, for its layer classes."""
    parallel = recipe.parallel
    return parallel.tp, parallel.dp_shard if parallel.tp > 1 else 1


def _with_pairs(teacher: TeacherShape, section: DistillSection, dim: int, stream_bytes: int) -> TeacherShape:
    """Layer classes with what pairs of layers take (`models.distill.hidden`) beside a student of this width."""
    pairs, width = len(pairs_of(section)), teacher.model.dim
    learned = pairs * (section.hidden_projection == "learned")
    # The stream is there for the next layer; of attention nothing but a projection reads what it gave out.
    read = len(section.attention) * (section.hidden_projection == "learned")
    return replace(
        teacher,
        learned=float(PROJECTION_BYTES * learned * dim * width),
        apart=float(pairs * (FP32 * width + EACH_BYTES) + read * dim * stream_bytes),
    )
