"""tilewright's own decoder: token ids in, loss out.

RMSNorm, rotary positions, SwiGLU; grouped-query or latent attention; dense or mixture of experts. Parameter names
equal those of Hugging Face's Llama and DeepSeek-V3, so `hf_weights` reads and writes their folders without a mapping.
It holds no precision logic: `precision.convert` swaps its plain `nn.Linear`, `nn.Embedding` and `RMSNorm` modules by
name, and `residual_dtype` sets what the residual stream between them is kept in.

Built by `build.build_model`, trained by `training.executor.standard`. Read `Decoder.loss` first, then `block.Block`.

Legend: B rows  S positions  D model width  V vocabulary  N = B*S tokens  L layers  E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs
from tilewright.models.base.checkpointing import (
    CONTEXTS,
    EXACT_INPUTS,
    check_modes,
    common_mode,
    silence_checkpoint_warning,
)
from tilewright.models.base.output_head import row_losses
from tilewright.models.base.preference import is_pairs, preference_loss, rows_of
from tilewright.models.base.protocols import LayerContext, LossOutput, Model
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.cache import DecoderCache
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.hf_config import to_hf_config
from tilewright.models.decoder.hf_weights import save_decoder
from tilewright.models.decoder.layers import RMSNorm, StreamSlices, rope_angles
from tilewright.models.decoder.moe import MoE
from tilewright.models.distill.hidden import HiddenLoss, of_batch
from tilewright.models.distill.loss import batch_loss
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.ops.base.documents import document_tensors, documents_from
from tilewright.ops.kernels import Kernels


class Trunk(nn.Module):
    """Embedding, layers, final norm (`model.` in Hugging Face's names)."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, numbers: Sequence[int] | None):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        block = Block if isinstance(config.architecture, str) else config.architecture.block
        self.layers = nn.ModuleList(
            block(config.at(layer), layer, kernels) for layer in numbers or range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps, kernels)


class Decoder(Model):
    """A causal language model. Implements `protocols.Model`.

    Args:
        config: the shape.
        kernels: implementations of the operations; None picks the best for this machine.
        numbers: of its layers; None: all.

    Parameters are created uninitialised where torch leaves them so: call `build.init_weights`, or load a folder.

    Example:
        >>> from tilewright.models.build import init_weights
        >>> model = Decoder(DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_layers=2))
        >>> init_weights(model, seed=0)
        >>> ids = torch.arange(12).view(2, 6)
        >>> model(ids).shape
        torch.Size([2, 6, 50])
        >>> out = model.loss({"input_ids": ids, "labels": ids + 1})
        >>> out.count.item(), round(out.loss_sum.item() / 12, 1)
        (12, 4.0)
    """

    forward_methods = ("loss", "next_token_logits", "logits_at")
    uses_every_parameter = True  # experts without tokens run on no rows
    """See `protocols.Model`."""

    def __init__(self, config: DecoderConfig, kernels: Kernels | None = None, numbers: Sequence[int] | None = None):
        super().__init__()
        self.config, self.architecture = config, config.architecture
        self.kernels = kernels = kernels or Kernels.default()
        self.model = Trunk(config, kernels, numbers)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()
        self.residual_dtype: torch.dtype | None = None
        """Dtype of the residual stream; None keeps that of the embedding's output. Set by `precision.convert`."""
        self.notes: list[str] = []
        self.slices: StreamSlices | None = None
        """Where ranks have other positions of the residual stream. Set by `parallel.inside.tensor`."""
        self.hidden_loss: HiddenLoss | None = None
        """Of layers that learn hidden values of a teacher."""
        self._compiled = self._in_parts = False
        self._load_LE: Tensor | None = None
        self.last_load_LE: Tensor | None = None
        """Rows of each expert, by layer, of the last step and all ranks."""

    @property
    def activation_checkpoint(self) -> ActivationCheckpoint:
        """The activations that all layers of the decoder keep for backward. Settable; see `protocols.Model`."""
        return common_mode(self.checkpointing)

    @activation_checkpoint.setter
    def activation_checkpoint(self, mode: ActivationCheckpoint) -> None:
        self.checkpointing = (mode,) * len(self.blocks)

    @property
    def checkpointing(self) -> tuple[ActivationCheckpoint, ...]:
        """The activations that each layer of the decoder keeps for backward. Settable; see `protocols.Model`."""
        return tuple(block.activation_checkpoint for block in self.blocks)

    @checkpointing.setter
    def checkpointing(self, modes: Sequence[ActivationCheckpoint]) -> None:
        check_modes(modes, len(self.blocks))
        for block, mode in zip(self.blocks, modes, strict=True):
            block.activation_checkpoint = mode
        self._note_opaque_parts()
        self._note_exact_inputs()

    @property
    def attention_blocks(self) -> tuple[int, ...]:
        """Query rows at a time in the attention of each of the decoder's layers, 0 for all. Settable."""
        return tuple(block.attention_block for block in self.blocks)

    @attention_blocks.setter
    def attention_blocks(self, rows: Sequence[int]) -> None:
        for block, number in zip(self.blocks, rows, strict=True):
            block.attention_block = number

    @property
    def checkpoint_inputs(self) -> CheckpointInputs:
        """The form in which a layer of the decoder that is recomputed whole keeps its input. Settable; see
        `protocols.Model`."""
        return self.blocks[0].checkpoint_inputs

    @checkpoint_inputs.setter
    def checkpoint_inputs(self, kind: CheckpointInputs) -> None:
        if kind not in ("exact", "fp8"):
            raise ValueError(f"checkpoint_inputs is exact or fp8, not {kind!r}")
        if self._compiled and kind != self.checkpoint_inputs:
            raise ValueError("set checkpoint_inputs before compile_blocks: it decides which part is compiled")
        for block in self.blocks:
            block.checkpoint_inputs = kind
        self._note_exact_inputs()

    @property
    def net(self) -> "Decoder":
        """The decoder itself as `net`: see `protocols.Model`, and so the next three."""
        return self

    head = property(lambda self: self.lm_head)
    max_positions, task = None, "causal_lm"

    def tie_weights(self) -> None:
        """Make the decoder's head and embedding one parameter where the shape says so; see `protocols.Model`."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Output of the decoder's final norm [B, S, D]; see `protocols.Model`."""
        x_BSD, context = self.prologue(batch)
        return self.model.norm(self._run_layers(x_BSD, context)[0])

    def forward(
        self, input_ids_BS: Tensor, positions_BS: Tensor | None = None, segments_BS: Tensor | None = None
    ) -> Tensor:
        """The decoder's logits [B, S, V] of what `hidden` takes. For the loss use `loss`, which never holds them
        all."""
        given = {"input_ids": input_ids_BS, "positions": positions_BS, "segments": segments_BS}
        return self.lm_head(self.hidden({name: tensor for name, tensor in given.items() if tensor is not None}))

    logits = forward  # see `protocols.Model`

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """Compute the decoder's loss: cross-entropy summed over the targets of one micro-batch.

        Args:
            batch: input_ids [B, S]; labels [B, S], already shifted, -100 where there is no target; positions and
                segments [B, S] where rows are packed. Or pairs of answers, see `base.preference`.
        """
        x_BSD, context = self.prologue(batch)
        x_BSD, loads = self._run_layers(x_BSD, context)
        out = self.epilogue(x_BSD, context, batch)
        return replace(out, aux=out.aux | self.aux_metrics(loads))

    # ---- `view.LayerwiseModel`: the same, in parts that can be run one at a time ----

    @property
    def blocks(self) -> Sequence[Block]:
        """The decoder's layers (blocks), in order."""
        return cast(Sequence[Block], self.model.layers)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, in order; see `protocols.Model`."""
        return tuple(self.blocks)

    def attention_of(self, layer: nn.Module) -> nn.Module | None:
        """The attention module of a layer of the decoder: see `protocols.Model`."""
        block = cast(Block, layer)
        return block.self_attn if block.has_attention and block.can_give else None

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        """The tensors that all layers of the decoder read: cos and sin of the positions, documents."""
        batch = rows_of(batch)
        ids_BS, positions_BS = batch["input_ids"], batch.get("positions")
        if positions_BS is None:
            positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None]
        cos, sin = self._angles(positions_BS)
        return {"cos": cos, "sin": sin, **document_tensors(self.kernels.documents(batch)), **of_batch(batch)}

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        """Compute the input of the decoder's first layer: embedded tokens [B, S, D], and `context`."""
        return self._embedded(rows_of(batch)["input_ids"]), self.context(batch)

    def layer(self, index: int, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """One layer of the decoder; see `Block.forward`."""
        give = self.hidden_loss is not None and self.hidden_loss.reads_attention(index)
        inputs = x_BSD, context["cos"], context["sin"], documents_from(context)
        x_BSD, load_E, given_BSD = self.blocks[index](*inputs, give=give)
        return x_BSD if self.hidden_loss is None else self.hidden_loss(index, x_BSD, given_BSD, context), load_E

    def epilogue(self, x_BSD: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        """Compute the decoder's loss from its last layer's output: final norm, head and loss."""
        x_BSD = self.model.norm(x_BSD)
        if is_pairs(batch):
            return preference_loss(row_losses(self.kernels, self.lm_head, x_BSD, rows_of(batch)["labels"]), batch)
        out = batch_loss(self.kernels, self.lm_head, x_BSD.flatten(0, 1), batch)
        return out if self.hidden_loss is None else self.hidden_loss.added(out, context)

    def outer_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters that the decoder's prologue and epilogue read."""
        inside = () if self.hidden_loss is None else tuple(self.hidden_loss.parameters())  # in both: shared by layers
        after = (*self.model.norm.parameters(), *self.lm_head.parameters())
        return [*self.model.embed_tokens.parameters(), *inside], [*after, *inside]

    def new_cache(self, rows: int, length: int) -> DecoderCache:
        """The decoder's empty cache for `rows` rows of at most `length` positions; see `protocols.Model`."""
        return DecoderCache(len(self.blocks), rows, length)

    def next_token_logits(self, input_ids_BS: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """The decoder's FP32 logits [B, V] of the token after each row; see `protocols.Model`."""
        if cache is None:
            return self.lm_head(self.hidden({"input_ids": input_ids_BS})[:, -1:])[:, 0].float()
        with torch.no_grad():
            rows, num_new = input_ids_BS.shape
            cache.check_room(rows, num_new)
            cos, sin = cache.angles(num_new, self._angles, input_ids_BS.device)
            x_BSD = self._sliced(self._embedded(input_ids_BS))
            for block, kept in zip(self.blocks, cache.layers, strict=True):
                x_BSD, *_ = block(x_BSD, cos, sin, None, kept)
            x_BSD = x_BSD if self.slices is None else self.slices.leave(x_BSD, num_new)
            cache.advance(num_new)
            return self.lm_head(self.model.norm(x_BSD[:, -1:]))[:, 0].float()

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """The decoder's FP32 logits [N, V] of the tokens after the wanted positions; see `protocols.Model`."""
        return self.lm_head(self.hidden({"input_ids": input_ids_BS})[wanted_BS]).float()

    def after_step(self, group: dist.ProcessGroup | None = None) -> None:
        """Balance the decoder's experts after a step, by the load since the last call, summed over a group. Nothing to
        do when dense."""
        if not (routers := [cast(MoE, block.mlp).gate for block in self.blocks if block.is_moe]):
            return
        load_LE = self._load_LE
        if load_LE is None:  # this rank had no rows, others may have had some
            load_LE = torch.zeros(len(routers), self.config.num_experts, device=routers[0].weight.device)
        if group is not None:
            dist.all_reduce(load_LE, group=group)
        self.last_load_LE = load_LE
        biases = [router.rebalanced(load_E) for router, load_E in zip(routers, load_LE, strict=True)]
        self._load_LE = None  # from here on nothing can fail: all of it happens, or nothing
        for router, bias_E in zip(routers, biases, strict=True):
            router.e_score_correction_bias.copy_(bias_E)

    def compile_blocks(
        self, *, waits: bool = False, between_exchanges: Callable[[nn.Module], None] | None = None
    ) -> None:
        """Compile each layer of the decoder in place. Layers of one kind share one compiled graph; where weight
        gradients wait, one graph between two matmuls, inside of what is recomputed: torch recomputes what is compiled
        in pieces as a whole only where it is called from outside.

        A mixture-of-experts layer is compiled in parts, because which expert gets how many rows depends on the data:
        attention, norms, shared experts, and one graph of variable length for all routed experts. Layers that keep
        different things for backward have a graph for each way, made when it first runs.

        Args:
            waits: weight gradients are computed later than those of inputs.
            between_exchanges: compiles attention or an MLP whose hooks exchange with other ranks, which stay outside;
                each layer is compiled piece by piece then.
        """
        silence_checkpoint_warning()
        options, limit = layer_options(), graph_limit()
        compile_part = between_exchanges or (lambda part: part.compile(options=options, **limit))
        for block in self.blocks:
            if not block.is_moe and between_exchanges is None:
                if waits or self.checkpoint_inputs == "fp8":
                    block.compiled_inside = True
                else:
                    block.compile(options=options, **limit)
                continue
            if block.has_attention:
                block.input_layernorm.compile(options=options, **limit)
                compile_part(block.self_attn)
            if block.has_mlp:
                block.post_attention_layernorm.compile(options=options, **limit)
                dense = cast(MoE, block.mlp).shared_experts if block.is_moe else block.mlp
                if dense is not None:
                    compile_part(dense)
            for expert in cast(MoE, block.mlp).experts if block.is_moe else ():
                expert.compile(dynamic=True, options=options, **limit)
        self._in_parts = between_exchanges is not None or self.config.num_experts > 0
        self._compiled = True
        self._note_opaque_parts()

    def check_save_hf(self, dtype: torch.dtype) -> None:
        """True if a layout holds the decoder's shape; see `protocols.Model`."""
        to_hf_config(self.config, "bfloat16")

    def save_hf(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        extra: Mapping[str, Any] | None = None,
        live: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """Write the decoder as a Hugging Face folder of Llama, Mistral or DeepSeek-V3 layout. See
        `hf_weights.save_decoder`."""
        save_decoder(self, folder, dtype=dtype, extra=extra, live=live)

    def _embedded(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.model.embed_tokens(ids_BS)
        return x_BSD.to(self.residual_dtype or x_BSD.dtype)

    def _angles(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        return rope_angles(positions_BS, self.config.rope_dim, self.config.rope_theta)

    def _run_layers(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Tensor]]:
        loads, length = [], x_BSD.shape[1]
        x_BSD = self._sliced(x_BSD)
        for index in range(len(self.blocks)):
            x_BSD, load_E = self.layer(index, x_BSD, context)
            if load_E is not None:
                loads.append(load_E)
        return x_BSD if self.slices is None else self.slices.leave(x_BSD, length), loads

    def _sliced(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.slices is None else self.slices.enter(x_BSD)

    def _note_opaque_parts(self) -> None:
        if self._compiled and CONTEXTS.keys() & set(self.checkpointing) and self._in_parts:
            kind = "mixture-of-experts layers" if self.config.num_experts else "layers whose matrices are cut"
            note = (
                f"Compiled {kind} are recomputed whole: checkpointing that keeps selected results cannot see into "
                "their compiled parts."
            )
            if note not in self.notes:
                self.notes.append(note)

    def _note_exact_inputs(self) -> None:
        wanted = "full" in self.checkpointing and self.checkpoint_inputs == "fp8"
        if wanted and self.config.num_experts and EXACT_INPUTS not in self.notes:
            self.notes.append(EXACT_INPUTS)

    @torch.no_grad()
    def aux_metrics(self, loads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Add the loads of this micro-batch up for `after_step`, and measure how far the fullest expert is above the
        mean."""
        if not loads:
            return {}
        load_LE = torch.stack(list(loads))
        load_LE = load_LE if self.slices is None else self.slices.total(load_LE)
        if self.training:
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        mean_L = load_LE.mean(-1)
        return {"moe_max_violation": ((load_LE.amax(-1) - mean_L) / mean_L.clamp_min(1e-9)).mean()}
