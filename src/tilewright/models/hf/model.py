"""Any Hugging Face causal or masked language model or image classifier as a `protocols.Model`.

Built from a local folder only, nothing is ever downloaded: from its config.json with random weights, or with the
weights in it. transformers is imported inside the functions, so a run without such a model does not need it.

Labels are ours: already shifted for causal models. The mixture-of-experts side losses that some models offer are left
out. Where a model cannot keep packed documents apart, `notes` says so. Built by `build.build_model`.

Legend: B rows  S positions  D model width  V vocabulary  N targets  C classes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs
from tilewright.core.errors import ConfigError
from tilewright.formats.fp8_layout import CODE_DTYPE
from tilewright.models.base.checkpointing import (
    EXACT_INPUTS,
    Fp8Checkpoint,
    check_modes,
    checkpoint_function,
    checkpoint_options,
    common_mode,
)
from tilewright.models.base.output_head import logits_loss, row_losses
from tilewright.models.base.preference import as_rows, is_pairs, preference_loss
from tilewright.models.base.protocols import LossOutput, Model
from tilewright.models.base.routers import find_routers
from tilewright.models.distill.foreign_hidden import loss_beside_hidden
from tilewright.models.distill.hidden import VALUES, HiddenLoss
from tilewright.models.distill.loss import batch_loss, is_taught
from tilewright.models.hf.attentions import attention_in
from tilewright.models.hf.cache import HFCache, next_logits, why_no_cache, why_no_pieces, why_not_joined
from tilewright.models.hf.fp8_names import plan_fp8
from tilewright.models.hf.packing import documents_as_rows, forward_arguments, in_packed_rows
from tilewright.models.hf.probe_packing import InputStyle, check_taught, probe_language_model, short_images, short_texts
from tilewright.models.hf.save import save_folder
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.ops.kernels import Kernels

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

Task = Literal["causal_lm", "masked_lm", "image_classification"]
_log = logging.getLogger(__name__)


class HFModel(Model):
    """A Hugging Face model that trains like our own. Implements `protocols.Model`.

    Args:
        net: the transformers model.
        task: what is learned.
        kernels: implementations of the operations.
    """

    net: "PreTrainedModel"
    forward_methods = ("next_token_logits", "logits_at")
    """See `protocols.Model`. `loss` is a call of `forward`."""
    uses_every_parameter = False
    """See `protocols.Model`. Experts may get no token, and layers be dropped."""

    architecture = "hf"
    """See `protocols.Model`."""

    def __init__(self, net: "PreTrainedModel", task: Task, kernels: Kernels | None = None):
        super().__init__()
        self.net = net
        self.task = task
        self.kernels = kernels or Kernels.default()
        self.notes: list[str] = []
        self.hidden_loss: HiddenLoss | None = None
        """Of layers that learn hidden values of a teacher."""
        self._style: InputStyle | None = None
        self._caches: bool | None = None
        self._joins: bool | None = None
        self._pieces: bool | None = None
        self._checkpointing: tuple[ActivationCheckpoint, ...] = ("none",) * (len(self.layers) or 1)
        self._checkpoint_inputs: CheckpointInputs = "exact"
        self._from_qdata = Fp8Checkpoint(self.kernels, self._note)

    @property
    def config(self) -> Any:
        """The transformers config of a Hugging Face model."""
        return self.net.config

    @property
    def head(self) -> nn.Module | None:
        """The head of a Hugging Face model, the layer that transformers says makes logits; see `protocols.Model`."""
        return self.net.get_output_embeddings()

    @property
    def table(self) -> nn.Embedding:
        """The embedding of tokens of a Hugging Face model."""
        return cast(nn.Embedding, self.net.get_input_embeddings())

    @property
    def max_positions(self) -> int | None:
        """A Hugging Face model's most positions of a row by config.json, or None; see `protocols.Model`."""
        found = getattr(self.config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def attention_blocks(self) -> tuple[int, ...]:
        """0 for a Hugging Face model: transformers' attention computes all rows at once; see `protocols.Model`."""
        return (0,) * (len(self.layers) or 1)

    @attention_blocks.setter
    def attention_blocks(self, rows: Sequence[int]) -> None:
        if any(rows):
            raise ConfigError(
                "Attention blocks are not supported by this model",
                got=f"attention_block {max(rows)} for layers of {type(self.net).__name__}",
                need="0; tilewright's own decoder alone computes attention by blocks",
                try_="a plan made for this model",
                where="memory.plan",
            )

    def tie_weights(self) -> None:
        """Tie the weights of a Hugging Face model that share their values; see `protocols.Model`."""
        self.net.tie_weights()

    @property
    def vocab_size(self) -> int:
        """Tokens that the Hugging Face model has an embedding for."""
        return self.table.weight.shape[0]

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """The Hugging Face model's loss of a batch, by calling the model: hooks on it, such as the precision region of
        a third-party model, take part."""
        return self(batch)

    def forward(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """Run a Hugging Face model: cross-entropy summed over the targets of one micro-batch, in FP32.

        Args:
            batch: input_ids, labels (shifted for causal_lm), positions and segments, each [B, S]; or for
                image_classification pixel_values [B, 3, H, W] and labels [B]; or pairs of answers, `base.preference`.
        """
        place = self._list_of_layers() if VALUES in batch else None
        if self.hidden_loss is not None and place is not None:
            self._input_style(packed="segments" in batch)  # its tries are no rows of the batch
            return loss_beside_hidden(self.forward, self.hidden_loss, self.attention_of, place, batch)
        if self.task == "image_classification":
            return _of_logits(self.net(pixel_values=batch["pixel_values"]).logits, batch["labels"])
        pairs, batch = (batch, as_rows(batch)) if is_pairs(batch) else (None, batch)
        style = self._input_style(packed="segments" in batch)
        if is_taught(batch):
            check_taught(self.net, style, packed="segments" in batch)
        arguments = forward_arguments(
            self.net, style.documents, style.causal, batch.get("positions"), batch.get("segments")
        )
        if style.documents == "rows" and "segments" in batch:
            batch = documents_as_rows(batch)
            if not style.causal:
                arguments["attention_mask"] = batch["attention_mask"]
        input_ids_BS, labels_BS = batch["input_ids"], batch["labels"]
        if style.plain_head:
            hidden_BSD = self.net.base_model(input_ids=input_ids_BS, **arguments).last_hidden_state
            head = cast(nn.Linear, self.head)
            if pairs is not None:
                return preference_loss(row_losses(self.kernels, head, hidden_BSD, labels_BS), pairs)
            return in_packed_rows(batch_loss(self.kernels, head, hidden_BSD.flatten(0, 1), batch), batch)
        logits_BSV = self.net(input_ids=input_ids_BS, **arguments).logits
        if pairs is not None:
            return preference_loss([logits_loss(*row)[0] for row in zip(logits_BSV, labels_BS, strict=True)], pairs)
        return in_packed_rows(_of_logits(logits_BSV, labels_BS), batch)

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The input of a Hugging Face model's head [B, S, D]; see `protocols.Model`."""
        style = self._input_style(packed="segments" in batch)
        check_taught(self.net, style, packed="segments" in batch)
        arguments = forward_arguments(
            self.net, style.documents, style.causal, batch.get("positions"), batch.get("segments")
        )
        return self.net.base_model(input_ids=batch["input_ids"], **arguments).last_hidden_state

    def logits(self, input_ids_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of a Hugging Face model; see `protocols.Model`."""
        return self.net(input_ids=input_ids_BS).logits

    def image_logits(self, pixels_B3HW: Tensor) -> Tensor:
        """Logits [B, C] of images by a Hugging Face model, as a batch has them (`pixel_values`)."""
        return self.net(pixel_values=pixels_B3HW).logits

    def short_batch(self) -> dict[str, Tensor]:
        """Two short rows of the kind that the Hugging Face model learns from, for trying something out."""
        if self.task == "image_classification":
            return short_images(self.net.config, self.net.device, self.net.dtype)
        return short_texts(self.vocab_size, self.net.device)

    def new_cache(self, rows: int, length: int) -> HFCache | None:
        """An empty cache of a Hugging Face model, which grows as it is filled; see `protocols.Model`."""
        if self._caches is None:
            reason = why_no_cache(self.net, self.vocab_size)
            if reason is not None:
                self._note(f"No key/value cache: {reason}. Rows are run whole for each new token.")
            self._caches = reason is None
        return HFCache(self._rows_join, self._takes_pieces) if self._caches else None

    def _rows_join(self) -> bool:
        if self._joins is None:
            reason = why_not_joined(self.net, self.vocab_size)
            if reason is not None:
                self._note(f"Rows run one after another: {reason}.")
            self._joins = reason is None
        return self._joins

    def _takes_pieces(self) -> bool:
        if self._pieces is None:
            reason = why_no_pieces(self.net, self.vocab_size)
            if reason is not None:
                self._note(f"Prompts run in one pass: {reason}.")
            self._pieces = reason is None
        return self._pieces

    def next_token_logits(self, input_ids_BS: Tensor, cache: HFCache | None = None) -> Tensor:
        """FP32 logits [B, V] of the token after each row by a Hugging Face model; see `protocols.Model`."""
        if self.task != "causal_lm":
            raise TypeError(f"a {self.task} model does not continue text")
        return next_logits(self.net, input_ids_BS, cache)

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """FP32 logits [N, V] after the wanted positions by a Hugging Face model; see `protocols.Model`."""
        if self.task != "causal_lm":
            raise TypeError(f"a {self.task} model does not continue text")
        arguments = forward_arguments(self.net)
        if not self._input_style(packed=False).plain_head:
            return self.net(input_ids=input_ids_BS, **arguments).logits[wanted_BS].float()
        hidden_BSD = self.net.base_model(input_ids=input_ids_BS, **arguments).last_hidden_state
        return cast(nn.Linear, self.head)(hidden_BSD[wanted_BS]).float()

    def after_step(self, group: dist.ProcessGroup | None = None) -> None:
        """Do nothing after a step of a Hugging Face model: transformers' models keep no state of their own."""

    @property
    def activation_checkpoint(self) -> ActivationCheckpoint:
        """The activations that all Hugging Face layers keep for backward. Settable; see `protocols.Model`."""
        return common_mode(self._checkpointing)

    @activation_checkpoint.setter
    def activation_checkpoint(self, mode: ActivationCheckpoint) -> None:
        self.checkpointing = (mode,) * (len(self.layers) or 1)

    @property
    def checkpointing(self) -> tuple[ActivationCheckpoint, ...]:
        """The activations that each Hugging Face layer keeps for backward. Settable; see `protocols.Model`."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, modes: Sequence[ActivationCheckpoint]) -> None:
        layers = self.layers
        check_modes(modes, len(layers) or 1)
        asked: list[ActivationCheckpoint] = [mode for mode in modes if mode != "none"]
        if asked and not self.net.supports_gradient_checkpointing:
            raise ConfigError(
                "Activation checkpointing is not supported by this model",
                got=f'train.activation_checkpoint = "{asked[0]}" with {type(self.net).__name__}',
                need='"none"',
                try_='train.activation_checkpoint = "none" and a smaller train.micro_batch_size',
                where="train.activation_checkpoint",
            )
        # transformers 5.23 names them so, and warns of the older names.
        renamed = hasattr(self.net, "activation_checkpointing_enable")
        family = "activation_checkpointing" if renamed else "gradient_checkpointing"
        if not asked:
            getattr(self.net, f"{family}_disable")()
        else:
            getattr(self.net, f"{family}_enable")(checkpoint_options(asked[0]))
        if layers and asked:
            for layer, mode in zip(cast(Sequence[Any], layers), modes, strict=True):
                layer.gradient_checkpointing = mode != "none"
                layer._gradient_checkpointing_func = checkpoint_function(mode)
        self._checkpointing = tuple(modes)
        self._keep_codes()

    @property
    def checkpoint_inputs(self) -> CheckpointInputs:
        """How a Hugging Face layer that is recomputed keeps its input. Settable; see `protocols.Model`."""
        return self._checkpoint_inputs

    @checkpoint_inputs.setter
    def checkpoint_inputs(self, kind: CheckpointInputs) -> None:
        if kind not in ("exact", "fp8"):
            raise ValueError(f"checkpoint_inputs is exact or fp8, not {kind!r}")
        self._checkpoint_inputs = kind
        self.checkpointing = self._checkpointing

    def _keep_codes(self) -> None:
        """Replace torch's checkpoint function by ours in a Hugging Face model whose layers keep their input in 8
        bits."""
        if self._checkpoint_inputs != "fp8":
            return
        uniform = len(set(self._checkpointing)) == 1
        layers = self._layers() if uniform else self.layers
        modes = self._checkpointing[:1] * len(layers) if uniform else self._checkpointing
        for layer in (cast(Any, layer) for layer, mode in zip(layers, modes, strict=True) if mode == "full"):
            if next(find_routers(layer), None) is None:
                layer._gradient_checkpointing_func = self._from_qdata
            else:
                self._note(EXACT_INPUTS)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of a Hugging Face model: the largest list of layers that can be checkpointed."""
        found = self._list_of_layers()
        return () if found is None else tuple(getattr(*found))

    def attention_of(self, layer: nn.Module) -> nn.Module | None:
        """The attention module of a Hugging Face model's layer, as its class names it; see `protocols.Model`."""
        return attention_in(self.net, layer)

    def _list_of_layers(self) -> tuple[nn.Module, str] | None:
        """Find the list of a Hugging Face model's layers: the module that has it, and its name there."""
        lists = [
            (parent, name)
            for parent in self.net.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.ModuleList)
        ]
        largest = max(lists, key=lambda at: sum(param.numel() for param in getattr(*at).parameters()), default=None)
        able = set(self._layers())
        return largest if largest is not None and able and set(getattr(*largest)) == able else None

    def _layers(self) -> list[nn.Module]:
        """The layers of a Hugging Face model that transformers can checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in self.net.modules() if isinstance(module, GradientCheckpointingLayer)]

    def compile_blocks(self, *, waits: bool = False) -> None:
        """Compile the Hugging Face layers that can be checkpointed, or the whole model where there are none."""
        name = "_gradient_checkpointing_func"  # there once checkpointing was set, on or off
        from_qdata = {layer for layer in self._layers() if getattr(layer, name, None) is self._from_qdata}
        if from_qdata:
            self._from_qdata.compiles = True
            self._note("Layers that keep 8-bit inputs are compiled for training only, not for evaluation.")
        for module in self._layers() or [self.net]:
            if module not in from_qdata:
                module.compile(options=layer_options(), **graph_limit())

    def check_save_hf(self, dtype: torch.dtype) -> None:
        """True if a Hugging Face model has anything to store in FP8, where asked for; see `protocols.Model`."""
        if dtype == CODE_DTYPE:
            plan_fp8(self.net)

    def save_hf(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        extra: Mapping[str, Any] | None = None,
        live: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """Write a Hugging Face model's folder; see `contract.Model.save_hf`.

        Raises:
            CheckpointError: see `save.save_folder`.
        """
        save_folder(self.net, Path(folder), dtype or self.net.dtype, extra or {}, live)

    def _input_style(self, packed: bool) -> InputStyle:
        """The input style of a Hugging Face model by the probe; its meaning for this run is noted the first time."""
        if self._style is None:
            self._style = probe_language_model(self.net, self.vocab_size)
            # This is inside of the first batch's autocast. What it has cached of weights would be missing when
            # `selective` counts the operations of a layer again.
            torch.clear_autocast_cache()
            name = type(self.net).__name__
            if self.task == "causal_lm" and not self._style.causal:
                raise ConfigError(
                    "Model attends to the tokens that it should predict",
                    got=f"{name}, whose attention is not causal",
                    need="a causal language model",
                    try_='model.task = "masked_lm", or "is_decoder": true in its config.json',
                    where="model.task",
                )
            if packed and self._style.documents == "rows":
                self._note(f"{name} takes no document masks: each document of a packed row runs as a padded row.")
            if packed and not self._style.exact:
                self._note(f"{name} ignores padding masks: tokens also see padding.")
        return self._style

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _log.warning(text)


def _of_logits(logits: Tensor, labels: Tensor) -> LossOutput:
    loss_sum, count, each = logits_loss(logits, labels)
    return LossOutput(loss_sum, count, each=each)
