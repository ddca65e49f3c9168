"""The shape of our own decoder, from formulas alone (`models.decoder.activation_bytes`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs, Recipe
from tilewright.core.hardware import Machine
from tilewright.models.build import spec_of
from tilewright.models.decoder.activation_bytes import FP32, TILE, Storage, role
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.spec import Formulas
from tilewright.ops.attention import attention_kind, keeps_mask
from tilewright.ops.base.compile import compiles_layers
from tilewright.ops.kernels import Kernels
from tilewright.ops.newton_schulz import operand_format
from tilewright.planner.machine.process_bytes import GRAPH_BYTES, KIND_BYTES, Pages, process_size
from tilewright.planner.model.gemms import (
    BYTES,
    DTYPES,
    LinearGemm,
    held_qdata,
    keeps_qdata,
    matmuls_of,
    operand_work,
    uncast,
)
from tilewright.planner.model.model_shape import (
    Coding,
    LayerClass,
    Line,
    ModelShape,
    distinct,
    largest_weight,
    rule_notes,
)
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.model.roofline import element_passes, expert_rows
from tilewright.planner.model.rounding_bytes import rounding_kept, rounding_moved
from tilewright.planner.model.skeleton import Skeleton
from tilewright.planner.trace.routed_rows import RoutedRows
from tilewright.precision.lora.lora import adapted_layers
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import Policy

WORK_GUESS = 0.6
"""Backward's need beyond what a layer keeps, as a share of it, where no trace can tell (experts of tilewright's own
decoder); what traces of dense layers say, rounded up."""


_LINEAR_WORK = 5.0
"""Time of linear attention beside softmax attention's for as many FLOPs: three times the products, by chunks, and small
ones (measured, docs/log.md: 5.2 at 512 positions, where a plan's rate of attention is measured)."""


def decoder_shape(skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine) -> ModelShape:
    """The shape of our own decoder in one precision mode."""
    assert skeleton.config is not None
    config, seq_len = skeleton.config, recipe.data.seq_len
    compiled = recipe.train.compile == "on" or compiles_layers(
        recipe.train.compile, machine, by_default=recipe.parallel.tp == 1
    )
    kernels = Kernels.from_sections(machine, recipe.ops, recipe.memory)
    number = DTYPES[policy.activation]
    width = config.qk_head_dim if config.attention == "mla" else config.head_dim
    kind = attention_kind(machine.device, width, packed=True)
    attention, loss = (
        kernels.choices[operation, machine.device, number, kind].candidate.name
        for operation, kind in (("attention", kind), ("cross_entropy", ""))
    )
    masked = not compiled and keeps_mask(attention, machine.device, number)
    narrow = skeleton.gathered_narrow(policy, kernels) if recipe.parallel.pp == 1 else ()  # stages gather as stored
    coded = skeleton.gathered_coded(policy, recipe.parallel)
    parallel = recipe.parallel
    embedding, layers, head = skeleton.weights(
        policy, narrow, parallel.ep, parallel.tp, coded, parallel.redundant_experts
    )
    pages = Pages.of(machine, BYTES[policy.matmul], compiled)
    copies = not narrow or recipe.parallel.dp_shard <= 1
    found = _Decoder(skeleton, config, recipe, policy, machine, pages, compiled, copies)
    every = matmuls_of(skeleton.model, skeleton.decided(policy))
    of_rest = [gemm for gemm in every if ".layers." not in f".{gemm.fqn}"]
    of_head = Line(0, seq_len * (config.dim * (2 * FP32 + BYTES[policy.activation]) + FP32))
    angles = Line(0, seq_len * FP32 * config.rope_dim)  # cosines and sines of half of it, which all layers read
    read = Line(FP32 * config.vocab_size * config.dim, of_head.per_row)
    return ModelShape(
        family="tilewright decoder",
        classes=distinct(
            replace(found, config=config.at(indices[0])).layer(place, weights, masked)
            for place, (indices, weights) in enumerate(zip(skeleton.indices, layers, strict=True))
        ),
        rest=LayerClass(
            name="rest",
            indices=(-1,),
            weights=Weights(),
            active_parameters=0,
            kept=of_head + angles + rounding_kept(of_rest, seq_len, BYTES[policy.activation]),
            moved=read.times(element_passes(compiled)) + rounding_moved(of_rest, seq_len, compiled=False),
            fused=compiled,
        ),
        embedding=embedding,
        head=head,
        tied=config.tie_embeddings,
        plain_head=True,
        seq_len=seq_len,
        dim=config.dim,
        vocab_size=config.vocab_size,
        stream_bytes=BYTES[policy.stream],
        matmul_bytes=BYTES[policy.matmul],
        matmul_format=policy.matmul,
        direction_format=operand_format(machine, recipe.ops.newton_schulz),
        logit_bytes=BYTES[policy.activation],
        compiled=compiled,
        loss_compiled=loss == "compiled",
        process_bytes=process_size(machine, compiles=compiled or loss == "compiled", foreign=False),
        kind_bytes=KIND_BYTES if compiled and machine.device == "cpu" else 0,
        expert_rows=expert_rows(machine),
        keeps_freed=machine.device == "cpu",
        gaps=pages.gaps,
        graph=GRAPH_BYTES if machine.device == "cpu" and not compiled else {},
        rebuilt=pages.rebuilt,
        notes=rule_notes(recipe),
    )


@dataclass(frozen=True)
class _Decoder:
    """Makes layer classes of a decoder in one precision mode."""

    skeleton: Skeleton
    config: DecoderConfig
    """Of the layer, see `DecoderConfig.at`."""
    recipe: Recipe
    policy: Policy
    machine: Machine
    pages: Pages
    compiled: bool
    copies: bool
    """Layers keep casts of their weights; shards are gathered in the format in which they are read."""

    @property
    def formulas(self) -> Formulas:
        found = spec_of(self.config.architecture).formulas
        assert found is not None
        return found

    @property
    def seq_len(self) -> int:
        return self.recipe.data.seq_len

    @property
    def chosen(self) -> float:
        """The number of experts of our decoder that a token goes through on this rank; ranks of `tp` have other tokens
        there."""
        return self.config.num_experts_per_token / self.recipe.parallel.tp

    def layer(self, place: int, weights: Weights, masked: bool) -> LayerClass:
        """The class of a layer of our decoder. `masked`: attention keeps a mask of all pairs of positions."""
        config, policy, seq_len = self.config, self.policy, self.seq_len
        indices = self.skeleton.indices[place]
        index, moe = indices[0], bool(self.skeleton.layers[place].is_moe)
        share_of_tokens = self.chosen / config.num_experts if config.num_experts else 1.0
        prefix = f"{self.skeleton.names[place]}."
        every = matmuls_of(self.skeleton.model, self.skeleton.decided(policy), share_of_tokens)
        matmuls = tuple(matmul for matmul in every if matmul.fqn.startswith(prefix))
        storage = storage_in(
            policy,
            matmuls,
            compiled=self.compiled,
            inputs=self.recipe.train.checkpoint_inputs,
            spread=self.recipe.parallel.ep > 1,
        )
        parallel = self.recipe.parallel
        slices = parallel.tp if parallel.sequence_parallel else 1
        storage = replace(storage, slices=slices, cut_codes=slices > 1 and self.seq_len % (slices * TILE) == 0)
        rounded = rounding_kept(matmuls, seq_len, BYTES[policy.activation])
        rounded += self._dropped(prefix, share_of_tokens)
        modes: tuple[ActivationCheckpoint, ...] = ("none", "selective", "matmuls", "attention")
        kept = {mode: self._kept(index, mode, storage) + rounded for mode in modes}
        work = self._work(kept["none"])
        windowed = 0 < config.sliding_window < seq_len
        whole = config.num_heads and config.attention != "linear" and not windowed
        mask = float(seq_len**2 * BYTES[policy.matmul]) if masked and whole else 0.0
        mlp = Line(0, self._mlp_share(index, storage) * kept["none"].per_row)
        fused = self.compiled and not moe  # layers with experts are compiled in pieces
        passed = kept["none"] if fused else self._kept(index, "none", replace(storage, compiled=False))
        expert = 3 * config.dim * config.expert_dim * moe
        inactive = (config.num_experts - config.num_experts_per_token) * expert
        elsewhere = (config.num_experts_per_token - self.chosen) * expert
        flops, kept_codes = self.formulas.flops(config, seq_len), keeps_qdata(self.machine, self.recipe)
        widths = (self.formulas.width(config, index), config.dim)
        operands = Line.through(*(operand_work(matmuls, rows * seq_len, self.machine) for rows in (1, 2)))
        return LayerClass(
            name=self.skeleton.class_name(experts=moe),
            indices=indices,
            weights=weights,
            active_parameters=weights.count - inactive,
            kept=kept["none"] + Line(0, mask),
            kept_selective=kept["selective"],
            kept_matmuls=kept["matmuls"],
            kept_attention=kept["attention"],
            input=self._kept(index, "full", replace(storage, inputs="exact")),
            routes=moe,
            routed=self._routed() if moe else RoutedRows(),
            work=Line(0, work * kept["none"].per_row) + operands,
            moved=passed.times(element_passes(fused)) + rounding_moved(matmuls, seq_len, compiled=fused),
            fused=fused,
            mlp_kept=mlp,
            mlp_work=Line(0, work * mlp.per_row),
            mask=mask,
            matmuls=matmuls,
            matmul_flops=float((flops.layers[index] - 2 * elsewhere) * seq_len),
            last_flops=float(flops.last[index] * seq_len),
            mlp_flops=2.0 * seq_len * (self.formulas.mlp_weights(config, index) - inactive - elsewhere),
            attention_flops=flops.attention[index] * seq_len * (_LINEAR_WORK if config.attention == "linear" else 1.0),
            largest_weight=largest_weight((config.dim * width for width in widths), self.machine),
            cast=max(0, weights.count - weights.narrow - uncast(matmuls)) if BYTES[policy.matmul] < FP32 else 0,
            called_experts=config.num_experts if moe else 0,
            buffers=float(held_qdata(matmuls, kept_codes) + FP32 * config.num_experts * moe),
            coding=Coding.of(matmuls, seq_len, self.machine, kept_codes),
        )

    def _routed(self) -> RoutedRows:
        """The rows that our decoder routes to experts: their elements, and bytes per element in matmuls, both ways."""
        size = BYTES[self.policy.matmul]
        return RoutedRows(self.chosen * self.seq_len * self.config.dim, size, size)

    def _kept(self, layer: int, mode: ActivationCheckpoint, storage: Storage) -> Line:
        """Bytes that a layer of our decoder keeps."""
        stored, sizes, config = BYTES[self.policy.storage], [], self.config
        without = replace(config, num_experts_per_token=0)
        share = self.chosen / config.num_experts_per_token
        filled = share * (expert_rows(self.machine) - 1) * (not storage.grouped)  # what fills rows up is kept too
        bare = replace(storage, spread=False)
        for rows in (1, 2):
            tokens = rows * self.seq_len
            total = self._of_tokens(config, layer, mode, storage, tokens)
            if share < 1:  # bytes are a straight line in the experts that a token goes through here
                least = self._of_tokens(without, layer, mode, storage, tokens)
                total = least + share * (total - least)
            if filled:
                of_rows = (self._of_tokens(one, layer, mode, bare, tokens) for one in (config, without))
                total += filled * (next(of_rows) - next(of_rows))
            copies = self.formulas.weight_copy_bytes(config, layer, mode, storage, stored) if self.copies else 0
            sizes.append(total + copies)
        return Line.through(*sizes)

    def _of_tokens(
        self, config: DecoderConfig, layer: int, mode: ActivationCheckpoint, storage: Storage, tokens: int
    ) -> float:
        of_each = self.formulas.layer_bytes(config, layer, mode, storage)
        return of_each * tokens + self.formulas.tile_bytes(config, layer, mode, storage, tokens)

    def _dropped(self, prefix: str, share_of_tokens: float) -> Line:
        """The bytes that dropout of adapters' inputs in our decoder keeps: their numbers that are left, and which these
        are."""
        if not self.recipe.lora.dropout:
            return Line(0, 0)
        layers = adapted_layers(self.skeleton.model).items()
        here = {name: module.get_parameter("lora_A").shape[1] for name, module in layers if name.startswith(prefix)}
        inputs = [width * (share_of_tokens if ".experts." in name else 1.0) for name, width in here.items()]
        return Line(0, self.seq_len * sum(inputs) * (BYTES[self.policy.matmul] + 1))

    def _mlp_share(self, layer: int, storage: Storage) -> float:
        """The token-wise part's share of what a layer of our decoder keeps, found by making that part almost
        nothing."""
        thin = replace(self.config, ffn_dim=1, expert_dim=1 if self.config.num_experts else 0)
        whole, rest = (self.formulas.layer_bytes(config, layer, "none", storage) for config in (self.config, thin))
        return max(0.0, 1 - rest / whole)

    def _work(self, kept: Line) -> float:
        """Backward's need in our decoder as a share of what a layer keeps; on a CPU as measured."""
        if self.machine.device == "cpu":
            return self.pages.work
        if self.config.num_experts or self.policy.is_fp8:
            return WORK_GUESS
        need = self.formulas.work_per_token(self.config, BYTES[self.policy.matmul], BYTES[self.policy.stream])
        return need / (kept.per_row / self.seq_len)


def storage_in(
    policy: Policy, matmuls: Sequence[LinearGemm], *, compiled: bool, inputs: CheckpointInputs, spread: bool
) -> Storage:
    """The dtypes in which activations of a layer of our decoder are kept.

    Args:
        policy: in one mode.
        matmuls: of the layer.
        compiled: whether it is.
        inputs: what a layer that is recomputed keeps of its input.
        spread: its experts are on several ranks.
    """
    gemms = {role(matmul.fqn): matmul.gemms for matmul in matmuls if matmul.gemms.any_scaled}
    kept = Storage(BYTES[policy.stream], BYTES[policy.activation], compiled, inputs, spread=spread)
    return _with_codes(kept, gemms, policy.keep)


def _with_codes(kept: Storage, gemms: Mapping[str, Gemms], keep: str) -> Storage:
    qdata = {
        name: formats.operands.input
        for name, formats in gemms.items()
        if formats.operands is not None
        and formats.wgrad.scaled
        and (keep == "qdata" or name.startswith("experts."))  # these run as one
    }
    fused = {name for name, form in qdata.items() if form.in_rows and gemms[name].fprop.scaled}
    return replace(kept, tiled=frozenset(gemms), qdata=qdata, fused=frozenset(fused))
