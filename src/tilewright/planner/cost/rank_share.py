"""The share of one rank in a run: rows of a step, parts of a sharded model, and what is put together from them.

Bytes are of the rank that holds most, the first one. What FSDP2 has whole, and for how long (torch 2.13):

    parts       parameters, gradients and states: always (`Weights.part`)
    a layer     gathered while it runs, and once more as the buffer that it was gathered into; in backward that of the
                layer below, which is fetched ahead. Its gradients whole, and those of the layer above in the buffer
                that is reduced, until they are parts
    the rest    embedding, head and last norm are one group: gathered from the first forward pass to the end of
                backward, their gradients whole until then
    all         gathered from forward to backward without `reshard_after_forward` (ZeRO-2); gradients whole from one
                micro-batch to the next without `reduce_each`

Copies (`dp_replicate`) hold the same. Groups of a few small parameters with another dtype are not counted apart.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel import WireName
from tilewright.core.errors import ConfigError
from tilewright.planner.model.model_shape import LayerClass, ModelShape
from tilewright.planner.model.part_weights import Weights

FP32 = 4
UNPRICED = "communication between ranks is not in the seconds: no bandwidth between them has been measured"
PRICED = (
    "communication takes the speed that as many processes of this machine had over gloo, measured once; taken for "
    "granted: none of it overlaps with computation"
)
UNPRICED_OFFLOAD = "not in the seconds: transfers of parallel.cpu_offload, and its update on the host"


@dataclass(frozen=True)
class Shards:
    """How the ranks of a run share it.

    Example:
        >>> Shards(ranks=8, count=4).cut, Shards(ranks=8).cut
        (True, False)
    """

    ranks: int = 1
    """Those that read different rows."""
    count: int = 1
    """Parts of a copy of the model; 1 for copies alone."""
    reshard: bool = True
    reduce_each: bool = False
    staged: bool = False
    """Layers are a stage's: their gradients are whole until the last of a step's passes."""
    offload: bool = False
    """Parts are in host memory."""
    tp: int = 1
    """Ranks that read the same rows, each with a part of every matrix."""
    experts_apart: bool = False
    """Whatever `count` is: routed experts are in parts over these too, and FSDP2 sums copies of one shard."""
    ep: int = 1
    """Of these ranks those that hold other experts."""
    wire: WireName = "fp32"
    """What gradients are sent as."""
    feedback: bool = False
    """What that loses is kept for the next step."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Shards":
        """The share of one rank of a recipe's run. `dp_shard = -1` is one part here: who knows the number of processes
        sets it before."""
        parallel = recipe.parallel
        count = max(1, parallel.dp_shard)
        apart = parallel.tp > 1 and (recipe.model.num_experts > 0 or parallel.dp_replicate > 1)
        alike = cls(
            parallel.dp_replicate * count,
            tp=parallel.tp,
            ep=parallel.ep,
            wire=parallel.grad_sync,
            feedback=parallel.grad_feedback,
        )
        if count == 1 and not apart and not (parallel.tp > 1 and recipe.model.kind == "hf"):
            return alike
        return replace(
            alike,
            count=count,
            reshard=parallel.reshard_after_forward,
            reduce_each=parallel.reduce_each,
            offload=parallel.cpu_offload,
            experts_apart=apart,
        )

    def beside(self, shape: ModelShape) -> "Shards":
        """The rank's share for a model that has experts, which are sharded apart, though its recipe does not say so."""
        apart = any(kind.times > 1 for kind in shape.weights.tensors.kinds)
        return replace(self, experts_apart=True) if apart else self

    @property
    def processes(self) -> int:
        """The number of all ranks that share the run."""
        return self.ranks * self.tp

    @property
    def cut(self) -> bool:
        """True if a rank's share is parts of the model that are put together."""
        return self.count > 1 or self.experts_apart

    def notes(self, cpu: bool, measured: bool) -> tuple[str, ...]:
        """Notes on what a plan of one rank's share leaves out of its seconds, and takes for granted in them.

        Args:
            cpu: parts on the host are where they are anyway.
            measured: the speed between ranks is known.
        """
        found = (PRICED if measured else UNPRICED,) if self.processes > 1 else ()
        return (*found, UNPRICED_OFFLOAD) if self.offload and not cpu else found

    @property
    def of_each(self) -> str:
        """Which rank's share a plan's bytes are, as words after a number of bytes; empty for one process."""
        return f" of each of {self.processes} ranks" if self.processes > 1 else ""

    def words(self) -> str:
        """The ranks that share the run, in words; empty for one process.

        Example:
            >>> Shards(ranks=8, count=4).words(), Shards(ranks=2).words(), Shards(ranks=2, count=2, tp=2).words()
            ('8 ranks: 2 copies in 4 shards', '2 ranks: 2 copies', '4 ranks: 2 shards, matrices in 2 parts')
        """
        copies = self.ranks // self.count
        shared = [f"{copies} copies"] if copies > 1 else []
        shared += [f"{self.count} shards"] if self.count > 1 else []
        cut = [f"matrices in {self.tp} parts"] if self.tp > 1 else []
        words = ", ".join([*([" in ".join(shared)] if shared else []), *cut])
        return f"{self.processes} ranks: {words}" if self.processes > 1 else ""

    def rows(self, recipe: Recipe) -> int:
        """A rank's share of the rows of a step, of the rank that has most of them; a pair of answers stays together."""
        together = 2 if recipe.data.format == "preferences" else 1
        return together * -(-recipe.train.global_batch_size // (together * self.ranks))


def check_shared(recipe: Recipe, ranks: int) -> None:
    """Check what several ranks cannot share, before there are any.

    Args:
        recipe: of the run.
        ranks: that read different rows.

    Raises:
        ConfigError: fewer samples in a step than processes.
    """
    if ranks == 1:
        return
    rows = 2 if recipe.data.format == "preferences" else 1
    if recipe.train.global_batch_size // rows < ranks:
        raise ConfigError(
            "Fewer samples per step than processes",
            where="train.global_batch_size",
            got=f"global_batch_size = {recipe.train.global_batch_size}, {ranks} processes",
            need=f"at least {ranks * rows}",
            try_=f"--train.global_batch_size {ranks * rows}",
        )


@dataclass(frozen=True)
class Gathered:
    """Bytes of a rank beyond its parts, those of a running layer left out; all zero where it holds the whole model."""

    shape: ModelShape
    shards: Shards
    num_micro: int
    wide: bool = False
    """Put together as they are stored, as evaluation in FP32 needs them."""

    @property
    def rest(self) -> float:
        """Gathered bytes of parameters outside of the layers, put together from all ranks' shares."""
        return self._of(self._rest)

    @property
    def largest(self) -> float:
        """Gathered bytes of parameters of the largest layer, put together from all ranks' shares."""
        return max((self._of(found.weights) for found in self.shape.classes), default=0.0)

    def layers(self, names: Collection[str]) -> float:
        """Gathered bytes of parameters of all layers of these classes, where they stay put together from forward to
        backward."""
        if not self.shards.cut or self.shards.reshard:
            return 0.0
        return sum(found.count * self._of(found.weights) for found in self.shape.classes if found.name in names)

    @property
    def accumulates(self) -> bool:
        """True if a rank's gradients are whole from one micro-batch to the next."""
        several = self.num_micro > 1 and not self.shards.reduce_each
        return self.shards.cut and (several or self.shards.staged)

    @property
    def gradients(self) -> float:
        """The bytes that whole gradients take beyond the rank's share."""
        return self._beyond_part(self.shape.weights) if self.accumulates else 0.0

    @property
    def rest_gradients(self) -> float:
        """Bytes of whole gradients of what is outside of the layers, beyond the rank's share."""
        return self._beyond_part(self._rest)

    @property
    def head_gradients(self) -> float:
        """A rank's part of `rest_gradients` that is there while layers run backward: the gradient of the matrix that
        the head reads."""
        return self._beyond_part(self.shape.embedding if self.shape.tied else self.shape.head)

    @property
    def rest_reduced(self) -> float:
        """Bytes of the buffer in which a rank's sharded gradients of what is outside of the layers are reduced."""
        return float(self._rest.tensors.gradients(self.shards.count)) if self.shards.cut else 0.0

    @property
    def _rest(self) -> Weights:
        return self.shape.embedding + self.shape.head

    def _of(self, weights: Weights) -> float:
        return float(weights.tensors.gathered(self.shards.count, wide=self.wide)) if self.shards.cut else 0.0

    def _beyond_part(self, weights: Weights) -> float:
        """Bytes of whole gradients beyond the rank's share; of experts that are spread a rank has those of its own ones
        alone."""
        trained = weights.part(self.shards.count).trained
        return float(weights.tensors.whole_gradients(self.shards.count) - FP32 * trained)


def layer_forward(found: LayerClass, shards: Shards) -> float:
    """Bytes of a layer's parameters on a rank while it runs forward, gathered, with the buffer that they are gathered
    in."""
    if not shards.cut or found.indices == (-1,):
        return 0.0
    gathered = found.weights.tensors.gathered(shards.count)
    return float(gathered * (2 if shards.reshard else 1))  # that stays gathered is counted by phase


def layer_backward(found: LayerClass, shards: Shards) -> tuple[float, float]:
    """Bytes on a rank of a layer's parameters while it runs backward, and of its gradients: with the next layer's
    parameters in their buffer too, and the gradients of the layer before in theirs."""
    if not shards.cut or found.indices == (-1,):
        return 0.0, 0.0
    gathered = found.weights.tensors.gathered(shards.count) if shards.reshard else 0
    gradients = float(found.weights.tensors.gradients(shards.count))
    return 2 * gathered + gradients, gradients
