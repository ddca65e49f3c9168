"""Layer classes of a model: layers of equal structure, measured once, however many there are.

A model of 671 billion parameters has a dozen kinds of matrices. Its layers are sorted by structure, one of each class
is measured (`foreign_shape`, or the decoder's own formulas in `decoder_shape`), and `planner.cost.solve` decides how
many of each class are treated how. Everything is a straight line in the rows of a micro-batch. No weights, no GPU.
"""

from functools import reduce

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.planner.model.decoder_shape import decoder_shape
from tilewright.planner.model.hf_shape import foreign_shape, trace_twice
from tilewright.planner.model.shape import ModelShape
from tilewright.planner.model.skeleton import Skeleton, skeleton_of
from tilewright.planner.trace.trace import Trace
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.schedule import ModeSchedule


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

    def find(self, recipe: Recipe) -> ModelShape:
        """The shape of a recipe's model: seconds of the precision mode that it ends in, and bytes of the widest mode
        that it passes through.

        Raises:
            ConfigError: the model cannot be built, or cannot do what the recipe says.
            CheckpointError: its folder cannot be read.
        """
        schedule = ModeSchedule.from_section(recipe.precision, recipe.train.steps)
        modes = dict.fromkeys(mode for mode in (schedule.mode, schedule.start_mode) if mode)
        parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
        policy = Policy.from_section(recipe.precision, self.machine.device, parameters=parameters)
        return reduce(ModelShape.covering, (self._in_mode(recipe, policy.in_mode(mode), mode) for mode in modes))

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
