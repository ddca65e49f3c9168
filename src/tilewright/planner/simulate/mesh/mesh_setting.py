"""One way to run a model on a mesh: what a search chooses between. No torch."""

from dataclasses import dataclass, replace

from tilewright.core.config.sections.parallel import WireName
from tilewright.core.memory_plan import KIND_OF, Activations
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline

_MODES = {kind: mode for mode, kind in KIND_OF.items()}


@dataclass(frozen=True)
class MeshSetting:
    """How ranks share a run, and what each of them does.

    Example:
        >>> str(MeshSetting(MeshSizes(dp_shard=4, tp=2), Pipeline(1), 2, 8, "keep", "fp32", "fp32"))
        'dp_shard 4, tp 2; 8 micro-batches of 2 rows; none; fp32 moments'
    """

    sizes: MeshSizes
    pipeline: Pipeline
    rows: int
    """Of a micro-batch."""
    count: int
    """Micro-batches per step and row of ranks."""
    activations: Activations
    moments: str
    master: str
    reduce_each: bool = False
    """Gradients are reduced after each micro-batch; without stages alone."""
    wire: WireName = "fp32"
    """What gradients are sent as."""

    @property
    def ep_stride(self) -> int:
        """The stride of a mesh setting between ranks that have other experts: they are neighbours in `dp_shard`."""
        return self.sizes.tp

    def settings(self) -> dict[str, object]:
        """The mesh setting's values, as a recipe names them."""
        sizes = self.sizes
        found: dict[str, object] = {f"parallel.{axis}": getattr(sizes, axis) for axis in ("pp", "tp", "ep")}
        found |= {"parallel.dp_replicate": sizes.dp_replicate, "parallel.dp_shard": sizes.dp_shard}
        if sizes.pp > 1:
            found["parallel.schedule"] = self.pipeline.schedule
            if self.pipeline.schedule.startswith("interleaved"):
                found["parallel.virtual_stages"] = self.pipeline.virtual
            if self.pipeline.layers:
                found["parallel.split"] = self.pipeline.layers
        if self.reduce_each:
            found["parallel.reduce_each"] = True
        found["train.micro_batch_size"] = self.rows
        found["train.activation_checkpoint"] = _MODES[self.activations]
        found["optim.moments"], found["optim.master_weights"] = self.moments, self.master
        found["parallel.grad_sync"] = self.wire
        return {name: value for name, value in found.items() if value != _USUAL.get(name)}

    def mesh_words(self) -> str:
        """Name the mesh of a setting in words: its axes of more than one rank."""
        names = ("pp", "dp_replicate", "dp_shard", "tp", "ep")
        words = [f"{axis} {getattr(self.sizes, axis)}" for axis in names if getattr(self.sizes, axis) > 1]
        return ", ".join(words) or "one rank"

    def schedule_words(self) -> str:
        """Name the schedule of a mesh setting in words: the order of its passes; empty without stages."""
        if self.sizes.pp == 1:
            return ""
        return self.pipeline.schedule + (f" x{self.pipeline.virtual}" if self.pipeline.virtual > 1 else "")

    def optimizer_words(self) -> str:
        """The optimizer's formats of a mesh setting in words, and of what is sent to it."""
        master = "" if self.master == "fp32" else f", {self.master} weights"
        wire = "" if self.wire == "fp32" else f", gradients sent in {self.wire}"
        return f"{self.moments} moments{master}{wire}"

    def __str__(self) -> str:
        """The mesh setting in few words."""
        parts = [
            self.mesh_words(),
            self.schedule_words(),
            f"{counted(self.count, 'micro-batch', 'es')} of {counted(self.rows, 'row')}",
        ]
        parts += [_MODES[self.activations] + (", reduced each" if self.reduce_each else ""), self.optimizer_words()]
        return "; ".join(filter(None, parts))

    @property
    def recomputed(self) -> str:
        """The mesh setting's `train.activation_checkpoint`."""
        return _MODES[self.activations]

    def without_layers(self) -> Pipeline:
        """The pipeline of a mesh setting without its layers, as schedules see it."""
        return replace(self.pipeline, layers=())


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number of things, counted in words for a mesh setting.

    Example:
        >>> counted(1, "row"), counted(2, "micro-batch", "es")
        ('1 row', '2 micro-batches')
    """
    return f"{number} {noun}{plural if number != 1 else ''}"


_USUAL: dict[str, object] = {"parallel.tp": 1, "parallel.ep": 1, "parallel.grad_sync": "fp32"}
"""Left out where they are the defaults."""
