"""Layer classes of a model: layers of equal structure, measured once, however many there are.

A model of 671 billion parameters has a dozen kinds of matrices. Its layers are sorted by structure, one of each class
is measured (`foreign_shape`, or the decoder's own formulas in `decoder_shape`), and `planner.cost.solve` decides how
many of each class are treated how. Everything is a straight line in the rows of a micro-batch. No weights, no GPU.
"""

from dataclasses import dataclass, replace
from functools import reduce

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.units import format_bytes
from tilewright.models.base.output_layers import find_heads
from tilewright.models.teacher import find_teacher
from tilewright.planner.model.decoder_shape import decoder_shape
from tilewright.planner.model.hf_shape import foreign_shape, trace_twice
from tilewright.planner.model.shape import ModelShape
from tilewright.planner.model.skeleton import Skeleton, skeleton_of
from tilewright.planner.trace.trace import Trace
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.schedule import ModeSchedule


@dataclass(frozen=True)
class TeacherBytes:
    """What a teacher takes on the device of a process."""

    weights: float = 0.0
    token: float = 0.0
    """Of the hidden values that it hands on, for each token of a step."""


def teacher_bytes(recipe: Recipe, vocab_size: int) -> TeacherBytes:
    """The bytes of a recipe's teacher, whole and in FP32; none without one.

    Args:
        recipe: of the student.
        vocab_size: of its tokenizer, which is the teacher's too.

    Raises:
        ConfigError: there is no such teacher, or it cannot be built.
        CheckpointError: its folder cannot be read.
    """
    if not recipe.distill.teacher:
        return TeacherBytes()
    found = find_teacher(recipe.distill.teacher)
    skeleton = skeleton_of(recipe.model_copy(update={"model": found.model, "lora": found.lora}), vocab_size)
    size = sum(tensor.nbytes for tensor in (*skeleton.model.parameters(), *skeleton.model.buffers()))
    for layer, indices in zip(skeleton.layers, skeleton.indices, strict=True):
        one = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
        size += (len(indices) - 1) * one
    return TeacherBytes(float(size), 4.0 * find_heads(skeleton.model)[-1].in_features)


class ShapeFinder:
    """Finds shapes of one model in several settings; keeps the meta model, and what was traced, between them.

    Args:
        vocab_size: of the tokenizer; classes of an image folder.
        machine: where it would run.
    """

    def __init__(self, vocab_size: int, machine: Machine) -> None:
        self.vocab_size = vocab_size
        self.machine = machine
        self._skeletons: dict[object, Skeleton] = {}
        self._traces: dict[object, tuple[Trace, Trace] | str] = {}
        self._teachers: dict[str, TeacherBytes] = {}

    def find(self, recipe: Recipe) -> ModelShape:
        """The shape of a recipe's model: seconds of the precision mode that it ends in, and bytes of the widest mode
        that it passes through; with its teacher's bytes.

        Raises:
            ConfigError: the model or its teacher cannot be built, or cannot do what the recipe says.
            CheckpointError: its folder cannot be read.
        """
        schedule = ModeSchedule.from_section(recipe.precision, recipe.train.steps)
        modes = dict.fromkeys(mode for mode in (schedule.mode, schedule.start_mode) if mode)
        parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
        policy = Policy.from_section(recipe.precision, self.machine.device, parameters=parameters)
        found = reduce(ModelShape.covering, (self._in_mode(recipe, policy.in_mode(mode), mode) for mode in modes))
        return self._taught(found, recipe) if recipe.distill.teacher else found

    def _taught(self, found: ModelShape, recipe: Recipe) -> ModelShape:
        """The shape of a model that learns from a teacher."""
        name = recipe.distill.teacher
        if name not in self._teachers:
            self._teachers[name] = teacher_bytes(recipe, self.vocab_size)
        teacher = self._teachers[name]
        note = (
            f"the teacher {name} is whole on each process: {format_bytes(teacher.weights)} on the device, counted as "
            "the process's; its forward pass is not in the seconds"
        )
        notes = (*found.notes, note)
        return replace(found, teacher_bytes=teacher.weights, taught_bytes=teacher.token, notes=notes)

    def _in_mode(self, recipe: Recipe, policy: Policy, mode: str) -> ModelShape:
        skeleton = self._skeleton(recipe)
        if skeleton.config is not None:
            return decoder_shape(skeleton, recipe, policy, self.machine)
        train = recipe.train
        kept = () if skeleton.names else (train.activation_checkpoint, train.checkpoint_inputs)
        sizes = (recipe.data.seq_len, recipe.data.image_size)
        key = (recipe.model, recipe.lora, recipe.precision, recipe.optim.master_weights != "fp32", mode, sizes, kept)
        if key not in self._traces:  # seconds for a large model, and most settings change nothing of it
            self._traces[key] = trace_twice(skeleton, recipe, policy, self.machine)
        return foreign_shape(skeleton, recipe, policy, self.machine, self._traces[key])

    def _skeleton(self, recipe: Recipe) -> Skeleton:
        how = (recipe.memory.executor, recipe.train.activation_checkpoint) if recipe.model.kind == "hf" else ()
        key = (recipe.model, recipe.lora, how)
        if key not in self._skeletons:
            self._skeletons[key] = skeleton_of(recipe, self.vocab_size)
        return self._skeletons[key]
