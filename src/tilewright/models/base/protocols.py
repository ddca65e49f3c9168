"""The methods that a model needs to be trained: the one interface between models and the training loop.

`decoder.Decoder` and `model.HFModel` implement `Model`; the executor needs `TrainableModel` alone. The loss is a SUM
over targets together with their count, because only the executor knows all tokens of an optimizer step: it divides
once, so uneven micro-batches give exactly the gradient of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs
from tilewright.ops.kernels import Kernels


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch.

    Args:
        loss_sum: FP32 scalar, sum over targets in nats, differentiable.
        count: int64 scalar, number of targets (labels other than -100; images for classification).
        aux: further detached FP32 scalars worth recording, by name; means over the targets. Of a step the mean over
            all its targets is recorded, so a micro-batch without any adds nothing.
        each: what `loss_sum` is made of, FP32, detached, in the shape of the batch's labels (of pairs [B]), 0 where
            there is no target; rows, documents and domains are told apart by it (`data.batches.microbatches`). None
            where the model tells only the sum.
    """

    loss_sum: Tensor
    count: Tensor
    aux: dict[str, Tensor] = field(default_factory=dict)
    each: Tensor | None = None


LayerContext = Mapping[str, Tensor]
"""What the layers of a model read beside the stream, by name. Nothing in it asks for a gradient."""
ALL_WHOLE: Mapping[str, int] = MappingProxyType({})
"""No tensor is asked for in part."""


class InitialValues(Protocol):
    """Initial values of a model. In whatever pieces it is asked for, each element gets the same value."""

    def __call__(self, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] = ALL_WHOLE) -> None:
        """Write the initial values of parameters and buffers.

        Args:
            tensors: on the host, contiguous, under their fully qualified names; each whole, or some of its rows.
            first_rows: of tensors that are not whole, where their first row is in the whole.
        """
        ...


class KeyValueCache(Protocol):
    """The state of rows that a model continues. Filled by `Model.next_token_logits`; belongs to that model alone,
    and to the weights that it had."""

    @property
    def length(self) -> int:
        """The positions of each row that a key/value cache holds; of joined caches those of the longest."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of a key/value cache, reserved ones too."""
        ...

    def growth(self, chunk: int) -> Sequence[tuple[int, float]]:
        """The most bytes of each layer of a key/value cache for the positions that it holds, and the number of
        positions from which on they grow no more (infinity: always).

        Args:
            chunk: most new positions of a pass, of which a layer with a window may hold all.
        """
        ...

    @property
    def takes_pieces(self) -> bool:
        """True if several tokens may follow those in a key/value cache in one pass; False: after the first pass one by
        one."""
        ...

    def joined(self, rest: Sequence[Any], width: int) -> "KeyValueCache | None":
        """Join key/value caches, each of one row of the same model, for passes of one token of each row.

        Args:
            rest: the others.
            width: rows that a pass has; ids behind those of the caches are the first row's, and are kept nowhere.

        Returns:
            What `next_token_logits` takes with ids [width, 1]; it takes the positions up in each of the caches. None
            where the model cannot run such rows together.
        """
        ...


class TrainableModel(nn.Module):
    """The methods that the executor calls. A model of one's own may inherit, or be a module that has these methods."""

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """Compute the loss of one micro-batch, whose tensors are on the model's device."""
        raise NotImplementedError

    def after_step(self, group: dist.ProcessGroup | None = None) -> None:
        """Act once after each optimizer step that was not skipped (experts are balanced).

        Args:
            group: ranks that train together and saw different data; None, and not passed, on one rank.
        """
        raise NotImplementedError


class Model(TrainableModel):
    """The methods that the rest of a run calls: `build.build_model` returns one."""

    kernels: Kernels
    """Implementations of the operations."""

    architecture: Any
    """Which answers are the model's: a name in `build.ARCHITECTURES`, or a `spec.ModelSpec` of the caller's own."""

    config: Any
    """The shape: a `DecoderConfig`, or transformers' config."""

    task: Any
    """What is learned: `model.task`."""

    net: nn.Module
    """The module whose tensors have the names of a Hugging Face folder, unless transformers renames them: the
    model itself, or a child of it."""

    head: Any
    """The linear layer that makes logits, last in the model. None of a model that names none, as of images."""

    max_positions: int | None
    """Most positions of a row that the model is made for; None where it takes any."""

    forward_methods: tuple[str, ...]
    """Methods that read parameters and do not call `forward`: sharded ones are gathered for them too."""

    uses_every_parameter: bool
    """Whether each trained parameter of `layers` has a gradient after every backward pass, whatever the batch. Shards
    of those that do not say so are gathered as they are stored."""

    precision_report: Any
    """What the model computes in: a `precision.report.ConversionReport`. Set by `precision.convert`."""

    notes: list[str]
    """What the model could not do as asked, in plain words. Grows by the first batch; shown and recorded."""

    activation_checkpoint: ActivationCheckpoint
    """Settable. none: keep all activations; selective: keep outputs of matmuls and attention; matmuls, attention: of
    one of them; full: recompute each layer. Never changes a loss or a gradient. Read only where all layers do the
    same."""

    checkpointing: tuple[ActivationCheckpoint, ...]
    """Settable. The same for each of `layers`; of a model whose layers were not found, one mode for all of it."""

    layers: Sequence[nn.Module]
    """The layers that can be treated each in its own way, in order. Empty where none were found."""

    def attention_of(self, layer: nn.Module) -> nn.Module | None:
        """Find the attention module of one of the model's `layers`. Its result, or the first of several, is the
        attention's output, as wide as the residual stream. None if it has none, or if that is not known."""
        raise NotImplementedError

    checkpoint_inputs: CheckpointInputs
    """Settable before `compile_blocks`; means something where `activation_checkpoint` is full. exact: keep each layer's
    input; fp8: keep it in 8 bits, one byte per element. Never changes a loss; with fp8 gradients are approximate."""

    attention_blocks: tuple[int, ...]
    """Settable. Query rows at a time in the attention of each of `layers`, 0 for all.

    Raises:
        ConfigError: set, by a model that computes attention whole.
    """

    def tie_weights(self) -> None:
        """Tie weights of the model: make those that share their values one parameter. Needed again after `to_empty`."""
        raise NotImplementedError

    def compile_blocks(self, *, waits: bool = False) -> None:
        """Compile the model's layers in place with torch.compile.

        Args:
            waits: weight gradients will wait (`ops.base.weight_gradient_queue`).
        """
        raise NotImplementedError

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the head's input, [B, S, D] in the residual stream's dtype. Language models only.

        Args:
            batch: input_ids [B, S]; of packed rows positions (of each token in its document; without them 0, 1, ... in
                each row) and segments (the document of each token, -1 for padding) [B, S].

        Raises:
            ConfigError: the head is more than one matmul, or documents of packed rows cannot be kept apart in place.
        """
        raise NotImplementedError

    def logits(self, input_ids_BS: Tensor) -> Tensor:
        """Compute the logits [B, S, V] of whole rows of one document each, all at once. Language models only."""
        raise NotImplementedError

    def new_cache(self, rows: int, length: int) -> KeyValueCache | None:
        """Make an empty key/value cache for `rows` rows of at most `length` positions. None if the model cannot keep
        one: rows are then run whole for each token, and `notes` says why. Causal language models only."""
        raise NotImplementedError

    def next_token_logits(self, input_ids_BS: Tensor, cache: Any = None) -> Tensor:
        """Compute FP32 logits [B, V] of the token after each row. Causal language models only.

        Args:
            input_ids_BS: whole rows; with a cache, what follows the positions that are in it.
            cache: of this model's `new_cache`; takes the positions up. Without gradients then.
        """
        raise NotImplementedError

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Compute FP32 logits [N, V] of the tokens after the wanted positions, row by row. Causal language models only.

        Args:
            input_ids_BS: rows, which may be padded with any token behind their last wanted position.
            wanted_BS: bool [B, S], true at N places. Only for these the head runs, where the model can be asked so.
        """
        raise NotImplementedError

    def check_save_hf(self, dtype: torch.dtype) -> None:
        """Raise CheckpointError if `save_hf` in this dtype would be refused. The model may be on the meta device."""
        raise NotImplementedError

    def save_hf(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        extra: Mapping[str, Any] | None = None,
        live: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """Write the model as a Hugging Face folder (config.json and safetensors).

        Args:
            folder: made where it does not exist; a model in it is replaced.
            dtype: weights are cast to it; None keeps theirs. float8_e4m3fn writes the layout of DeepSeek-V3: the
                layers' linear weights in FP8 with a scale for each 128x128 block, all others in BF16.
            extra: further keys of config.json, such as bos_token_id, eos_token_id, max_position_embeddings.
            live: gives a tensor of the state_dict, from its name and itself, with its bytes, until the next is asked
                for: where parameters are stored off the device.
        """
        raise NotImplementedError
