"""Bytes of a run by owner at each phase, from its workload.

Parameters, optimizer states, gradients and activations are counted from shapes. `other` is what no tensor of the model
accounts for, in three physical terms:

process     interpreter, torch, libraries, and what the compiler leaves in the process. On CUDA it is not in the
            allocator's figures and stands in `reserve_bytes`.
work        what operations need while they run: the chunks of the head's loss, a layer's gradients in backward.
kept pages  what glibc's malloc does not give back after a free (CPU only). They are what backward's work leaves, so the
            same number stands for both; a layer that was recomputed leaves what it kept besides.

The constants of the last two are measured; benchmarks/plan_accuracy.py holds the sums against real runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.activation_bytes import Storage, head_bytes, layer_bytes, role, tile_bytes, weight_copy_bytes
from tilewright.ops.native.loss import chunk_rows
from tilewright.plan.workload import BYTES, Product, Workload, fp8_unit
from tilewright.precision.gemms import FP8_FORMATS, Gemms
from tilewright.precision.tile_products import SWITCH_BYTES

MIB = 2**20
PROCESS_BYTES = 415 * MIB
"""Resident set with torch and this package imported and the data open, before the model (measured, CPU build)."""
COMPILER_BYTES = 105 * MIB
"""Added by torch.compile: its own modules, and the code it made (measured)."""
KIND_BYTES = 8 * MIB
"""Of those, graphs and code for one way of treating layers; each further way adds as much (measured: 5, 8 and 10)."""
TRANSFORMERS_BYTES = 65 * MIB
"""Added by transformers where the model is one of its own (measured)."""
TRITON_BYTES = 70 * MIB
"""Added by triton where it is installed: torch's compiler imports it (measured)."""
CUDA_RESERVE_BYTES = 700 * MIB
"""CUDA context and kernels, outside the allocator (not measured by this project yet)."""
LOSS_CHUNKS = {(True, 2): 1.0, (True, 4): 1.0, (False, 2): 5.0, (False, 4): 2.9}
"""Chunk-sized blocks alive at once in the head's loss, by (compiled, bytes of a logit): the logits, which become their
own gradient, and in eager form the FP32 softmax and its intermediates (measured)."""
WIDE_CHUNKS = 2.0
"""More of them where a CPU multiplies 16-bit operands in FP32 (`ops.native.wide`): the logits in FP32."""
EVALUATED_CHUNKS = {2: 5.0, 4: 2.0}
"""Chunk-sized blocks alive at once in the loss of an evaluation, which is not compiled and makes no gradient, by bytes
of a logit: the logits and their FP32 log-softmax, and of 16-bit logits an FP32 copy."""


@dataclass(frozen=True)
class Pages:
    """What backward needs beside what is kept, and what it leaves, as shares.

    `work`: of what a layer keeps where all is kept: its gradients, in FP32 in part, and the allocator's gaps.
    `rebuilt`: of what a layer makes again that did not keep it, besides. `gaps`: free pages between what all layers
    keep, as a share of it.
    """

    work: float
    rebuilt: float
    gaps: float

    @classmethod
    def of(cls, machine: Machine, operand_bytes: int, compiled: bool) -> "Pages":
        """The shares of a machine, the bytes of an operand of the products, and layers that are compiled or not.

        Measured with glibc on two kinds of CPU, 4 to 16 rows, 6 and 12 layers, a decoder and a Llama. One that
        multiplies 16-bit operands in FP32 frees the FP32 result beside the rounded one that is kept. Compiled FP32
        layers: 4 to 12 of them, three widths (docs/log.md, 2026-11-22).
        """
        if machine.device != "cpu":
            return cls(3.3, 1.0, 0.0)
        if _widened(machine, operand_bytes):
            return cls(3.3, 1.0, 0.0 if compiled else 0.47)
        if not compiled:
            return cls(2.0, 0.0, 0.4)
        return cls(2.5, 0.0, 0.1) if operand_bytes < 4 else cls(0.7, 1.0, 0.15)


@dataclass(frozen=True)
class Footprint:
    """Bytes by owner at each phase. `reserve_bytes`: held on the device outside these figures.
    `other_parts`: what `other` consists of at its largest."""

    phases: Mapping[str, Mapping[str, int]]
    other_parts: Mapping[str, int]
    reserve_bytes: int


def footprint(work: Workload) -> Footprint:
    """The bytes of a run; where it passes through several precision modes, the larger ones."""
    cpu = work.machine.device == "cpu"
    process = process_bytes(work) if cpu else 0
    activations = max(activation_bytes(work, mode) for mode in work.modes)
    backward_work = max(layer_work(work, mode) for mode in work.modes)
    head_work = max(loss_work(work, mode) for mode in work.modes)
    gradients = 4 * work.num_trainable  # FP32 also where parameters are stored in 16 bit
    held = {"parameters": work.parameter_bytes, "optimizer": optimizer_bytes(work), "buffers": buffer_bytes(work)}
    gaps = int(pages(work).gaps * activations)
    kept = backward_work + gaps if cpu else 0
    backward = _backward(activations, gradients, work.num_micro)
    first = {"gradients": gradients if work.num_micro > 1 else 0}
    phases = {
        "load": {"parameters": held["parameters"], "buffers": held["buffers"], "other": process},
        "forward": held | first | {"activations": activations, "other": process + head_work + kept},
        "backward": held | backward | {"other": process + gaps + backward_work},
        "update": held | {"gradients": gradients, "other": process + kept + (activations if cpu else 0)},
        "evaluate": _evaluation(work, held, process, activations + kept if cpu else 0),
    }
    phases["checkpoint"] = checkpoint_phase(work, phases, held["parameters"] + held["optimizer"])
    parts = {"process": process, "loss of the head": head_work, "backward of a layer": backward_work}
    return Footprint(phases, parts, 0 if cpu else CUDA_RESERVE_BYTES)


def process_bytes(work: Workload) -> int:
    """What the process holds besides the model."""
    compiles = work.compiled or (work.loss_compiled and head_shape(work) is not None)
    return process_size(work.machine, compiles=compiles, foreign=work.config is None)


def process_size(machine: Machine, *, compiles: bool, foreign: bool) -> int:
    """The same, of a run that compiles something or not, and of a model of transformers or our own."""
    triton = TRITON_BYTES if machine.versions.get("triton") else 0
    return PROCESS_BYTES + triton + (COMPILER_BYTES if compiles else 0) + (TRANSFORMERS_BYTES if foreign else 0)


def product_bytes(work: Workload) -> int:
    """Bytes of an operand of the products, in the narrowest of the run's modes."""
    return min(BYTES[policy.product] for policy in work.policies.values())


def pages(work: Workload) -> Pages:
    """The shares of a run."""
    return Pages.of(work.machine, product_bytes(work), work.compiled)


def _widened(machine: Machine, operand_bytes: int) -> bool:
    """Whether 16-bit operands are multiplied in FP32."""
    return machine.device == "cpu" and operand_bytes == 2 and not machine.cpu_multiplies(torch.bfloat16)


def _backward(activations: int, gradients: int, num_micro: int) -> dict[str, int]:
    """Gradients grow while activations go: with one micro-batch the larger of the two is the peak."""
    if num_micro > 1:
        return {"gradients": gradients, "activations": activations}
    return {"gradients": gradients, "activations": max(0, activations - gradients)}


def _evaluation(work: Workload, held: dict[str, int], process: int, kept: int) -> dict[str, int]:
    """No gradients; FP32 throughout where the recipe says so. On a CPU it runs inside the pages that training left."""
    wide = 2 * work.num_narrow if work.recipe.precision.eval_fp32 else 0
    return held | {"parameters": work.parameter_bytes + wide, "other": process + kept + evaluated_loss_work(work)}


def checkpoint_phase(work: Workload, phases: Mapping[str, Mapping[str, int]], staging: int) -> dict[str, int]:
    """While a checkpoint is written: training goes on beside a host copy of the state, or stands still without one."""
    if not written_beside(work.recipe):
        return dict(phases["update"])
    busiest = max(phases.values(), key=lambda owners: sum(owners.values()))
    return dict(busiest) | {"other": busiest["other"] + (staging if work.machine.device == "cpu" else 0)}


def written_beside(recipe: Recipe) -> bool:
    """Whether checkpoints are written from a copy while training goes on. The last one never is: nothing follows it."""
    return recipe.save.background and 0 < recipe.save.every < recipe.train.steps


def optimizer_bytes(work: Workload) -> int:
    """Two moments, and what parameters that are stored in 16 bit have beside them: an FP32 master, 8 bits, nothing."""
    optim = work.recipe.optim
    moment = {"fp32": 4, "bf16": 2, "8bit": 1}[optim.moments]
    scales = 4 * work.num_blocks if optim.moments == "8bit" else 0
    master = {"fp32": 4, "split24": 1, "stochastic": 0}[optim.master]
    return 2 * (moment * work.num_trainable + scales) + master * work.num_narrow


def buffer_bytes(work: Workload) -> int:
    """Router biases and, on a CPU, FP8 data of weights with what says their formats; the rest is made in the step."""
    codes = max(held_codes(products, work.machine) for products in work.products.values())
    if work.config is None or not work.config.num_experts:
        return codes
    return codes + sum(4 * work.config.num_experts for i in range(work.config.num_layers) if work.config.is_moe(i))


def held_codes(products: Sequence[Product], machine: Machine) -> int:
    """Bytes kept of quantised weights, and of what says their formats; on a GPU nothing is kept."""
    if machine.device != "cpu":
        return 0
    return sum(product.code_bytes + SWITCH_BYTES for product in products if product.gemms.any_fp8)


def storage(work: Workload, mode: str) -> Storage:
    """What activations are kept in, without layers that have 8-bit products."""
    policy = work.policies[mode]
    inputs = work.recipe.train.checkpoint_inputs
    return Storage(BYTES[policy.stream], BYTES[policy.activation], work.compiled, inputs)


def layer_storages(work: Workload, mode: str) -> list[Storage]:
    """What each layer's activations are kept in, for tilewright's own decoder."""
    assert work.config is not None
    gemms: list[dict[str, Gemms]] = [{} for _ in range(work.config.num_layers)]
    for product in work.products[mode]:
        parts = product.fqn.split(".")
        if product.gemms.any_fp8 and "layers" in parts:
            gemms[int(parts[parts.index("layers") + 1])][role(product.fqn)] = product.gemms
    keep = work.policies[mode].keep
    return [_with_codes(storage(work, mode), found, keep) for found in gemms]


def _with_codes(kept: Storage, gemms: Mapping[str, Gemms], keep: str) -> Storage:
    codes = {
        name
        for name, formats in gemms.items()
        if formats.wgrad in FP8_FORMATS and (keep == "codes" or name.startswith("experts."))  # these run as one
    }
    fused = {name for name in codes if gemms[name].fprop in FP8_FORMATS and not gemms[name].tensorwise}
    return replace(kept, tiled=frozenset(gemms), codes=frozenset(codes), fused=frozenset(fused))


def activation_bytes(work: Workload, mode: str) -> int:
    """Bytes alive between forward and backward of one micro-batch, weight copies of the products among them."""
    if work.config is None:
        assert work.trace is not None
        if work.trace.head is None:
            return work.trace.kept_bytes
        num_tokens, dim, vocab_size = work.trace.head
        return work.trace.kept_bytes + num_tokens * dim * BYTES[work.policies[mode].activation] + 4 * vocab_size * dim
    config, kept = work.config, storage(work, mode)
    checkpoint = work.recipe.train.activation_checkpoint
    stored = BYTES[work.policies[mode].storage]
    total = head_bytes(config, work.num_tokens, kept) + _masks(work, kept)
    for i, layer in enumerate(layer_storages(work, mode)):
        total += layer_bytes(config, i, checkpoint, layer) * work.num_tokens
        total += tile_bytes(config, i, checkpoint, layer, work.num_tokens)
        total += weight_copy_bytes(config, i, checkpoint, layer, stored)
    return total


def _masks(work: Workload, kept: Storage) -> int:
    """Eager attention of torch's keeps one mask a layer and row, in the products' format."""
    if not work.attention_masks or work.recipe.train.activation_checkpoint != "none" or work.config is None:
        return 0
    return work.config.num_layers * work.num_tokens * work.seq_len * kept.product


def layer_work(work: Workload, mode: str) -> int:
    """Backward's need for the layer that needs most: its gradients, and what it did not keep and makes again."""
    checkpoint, share = work.recipe.train.activation_checkpoint, pages(work)
    if work.config is None:
        return int((share.work + share.rebuilt * (checkpoint != "none")) * work.layer_kept)
    needs = []
    for i, kept in enumerate(layer_storages(work, mode)):
        everything = layer_bytes(work.config, i, "none", kept)
        rebuilt = max(0, everything - layer_bytes(work.config, i, checkpoint, kept))
        needs.append(share.work * everything + share.rebuilt * rebuilt)
    return int(max(needs) * work.num_tokens) + operand_work(work, mode)


def operand_work(work: Workload, mode: str) -> int:
    """Operands of the busiest 8-bit product: both copies of codes, and as decoded where no unit multiplies them."""
    size = 2 if fp8_unit(work.machine) else 4
    sizes = [
        size * (work.num_tokens * product.share * (product.num_in + product.num_out) + product.num_weights)
        for product in work.products[mode]
        if product.gemms.any_fp8
    ]
    return int(max(sizes, default=0))


def loss_work(work: Workload, mode: str) -> int:
    """What the head's loss holds at its busiest chunk, beyond the gradients that it leaves (see `ops.native.loss`)."""
    head = head_shape(work)
    if head is None:
        assert work.trace is not None
        return work.trace.peak_bytes - work.trace.kept_bytes
    num_tokens, dim, vocab_size = head
    size = BYTES[work.policies[mode].activation]
    chunk = chunk_rows(num_tokens, vocab_size * size, work.recipe.memory.loss_tile) * vocab_size * size
    return int(loss_chunks(work.machine, work.loss_compiled, size) * chunk) + size * vocab_size * dim


def evaluated_loss_work(work: Workload) -> int:
    """What the head's loss holds at its busiest chunk of an evaluation."""
    wide = work.recipe.precision.eval_fp32
    size = 4 if wide else BYTES[work.policies[work.modes[-1]].activation]
    head = head_shape(work)
    if head is None:
        return loss_work(work, work.modes[-1]) * size // BYTES[work.policies[work.modes[-1]].activation]
    return int(evaluated_loss_bytes(*head, size, work.recipe.memory.loss_tile))


def evaluated_loss_bytes(num_tokens: int, dim: int, vocab_size: int, size: int, loss_tile: int) -> float:
    """The same of a head whose loss is `ops.loss`, with logits of `size` bytes; a weight that is cast is copied."""
    chunk = chunk_rows(num_tokens, vocab_size * size, loss_tile) * vocab_size * size
    return EVALUATED_CHUNKS[size] * chunk + (size * vocab_size * dim if size < 4 else 0)


def loss_chunks(machine: Machine, compiled: bool, logit_bytes: int) -> float:
    """Chunk-sized blocks alive at once in the head's loss."""
    if machine.device != "cpu":
        return 2.0
    return LOSS_CHUNKS[compiled, logit_bytes] + (WIDE_CHUNKS if _widened(machine, logit_bytes) else 0.0)


def head_shape(work: Workload) -> tuple[int, int, int] | None:
    """(tokens of a micro-batch, width, vocabulary) of a head whose loss is `ops.loss`; None for other heads."""
    if work.config is not None:
        return work.num_tokens, work.config.dim, work.config.vocab_size
    return work.trace.head if work.trace is not None else None
