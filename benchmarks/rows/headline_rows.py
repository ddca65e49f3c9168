"""What `benchmarks.runs.headlines` compares: training loops of one decoder, from the same weights on the same tokens.

plain   Hugging Face's Llama, FP32 weights, torch's fused AdamW, the norm clipped; without and with BF16 autocast
peers   the same model as a user tunes it: pure BF16, each layer checkpointed, the head's loss in chunks, torchao's
        8-bit AdamW with stochastic rounding; or that optimizer inside the backward pass, parameter by parameter
ours    recipe slice_cpu and settings of it, and the standard executor

`compiled`: the decoder layers (ours and theirs) and the peers' chunk of the loss go through torch.compile.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MICRO, ROWS, SEQ, TEXTS = 4, 2, 512, 3
"""Micro-batches a step, rows in each, tokens in a row, and different steps before rows come again (so losses fall)."""
CHUNK = 256
"""Tokens whose logits a peer has in memory at once: what `memory.loss_chunk_bytes` of the recipe comes to."""
TINY = {
    "data.vocab_size": "512",
    "model.dim": "64",
    "model.num_layers": "3",
    "model.num_heads": "2",
    "model.ffn_dim": "128",
}
WIDE = {"optim.moments": "fp32", "optim.master_weights": "fp32"}
STANDARD = WIDE | {"memory.executor": "standard", "optim.clip": "two_pass"}
OURS = {
    "standard": STANDARD,
    "recomputed": STANDARD | {"train.activation_checkpoint": "full"},
    "layer_major": WIDE,
    "bits8": {},
    "bits8_disk": {"memory.offload_optimizer": "disk"},
}
PEERS = ("peer", "peer_in_backward")
ROWS_OF = {
    "eager": ("plain", "autocast", *PEERS, "standard", "bits8", "bits8_disk"),
    "compiled": ("autocast", *PEERS, *OURS),
}
"""Rows of the table by mode."""

Step = Callable[[int], float]
"""Takes the number of a step, counted from 0; gives the mean loss before the update."""


def why_not(name: str) -> str | None:
    """Why a row cannot be measured here; None where it can."""
    if name in PEERS and find_spec("torchao") is None:
        return "torchao is not installed: pip install 'tilewright[bench]'"
    return None


def load_libraries(name: str) -> None:
    """Import what a row's user imports, so that its size can be reported from that of the training."""
    for module in (
        ("tilewright.training.executor.kinds",) if name in OURS else ("transformers.models.llama.modeling_llama",)
    ):
        import_module(module)
    if name in PEERS:
        import_module("torchao.optim")


def make_step(name: str, compiled: bool, tiny: bool) -> Step:
    """A row's training loop, its weights made."""
    if name in OURS:
        return _ours(name, compiled, tiny)
    return _peer(name, compiled, tiny) if name in PEERS else _plain(name, compiled, tiny)


def recipe_of(name: str, tiny: bool) -> Any:
    """Recipe slice_cpu with a row's settings; the model of all rows."""
    from tilewright.core.config.load import load_recipe

    settings = {"run.device": "cpu", "run.name": "benchmark"} | OURS.get(name, {}) | (TINY if tiny else {})
    return load_recipe("slice_cpu", settings, environ={}).recipe


def microbatches(step: int, vocab: int) -> list[dict[str, Tensor]]:
    """The rows of a step."""
    made = []
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(100 * (step % TEXTS) + micro)
        rows = torch.randint(0, vocab, (ROWS, SEQ + 1), generator=generator)
        made.append({"input_ids": rows[:, :-1], "labels": rows[:, 1:].contiguous()})
    return made


# ---- ours ----


def _ours(name: str, compiled: bool, tiny: bool) -> Step:
    """Our decoder under the recipe's formats, optimizer and executor."""
    from tilewright.core.hardware import detect_machine
    from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
    from tilewright.memory.tracking.tracker import MemoryTracker
    from tilewright.models.build import build_model, init_weights
    from tilewright.ops.kernels import Kernels
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.param_groups import decay_groups
    from tilewright.parallel.world import World
    from tilewright.precision.convert import convert
    from tilewright.precision.policy.policy import Policy
    from tilewright.training.components.model import first_values
    from tilewright.training.executor.base import ExecutorInputs
    from tilewright.training.executor.kinds import layer_major_executor
    from tilewright.training.executor.standard import StandardExecutor

    recipe = recipe_of(name, tiny)
    optim, vocab, folder = recipe.optim, recipe.data.vocab_size, Path("runs") / "benchmark"
    kernels = Kernels(detect_machine("cpu"), {}, compile=compiled, loss_chunk_bytes=recipe.memory.loss_chunk_bytes)
    sliced = recipe.memory.can.offload
    model = build_model(recipe.model, vocab, kernels, "meta" if sliced else "cpu")
    values = first_values(recipe, model) if sliced else None
    if values is None:
        init_weights(model, recipe.run.seed)
    parameters = "" if optim.master_weights == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=kernels)
    if values is not None:
        to_placeholders(model, "cpu")
        fill_buffers(model, values)
    model.train()
    model.activation_checkpoint = recipe.train.activation_checkpoint
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    if compiled:
        model.compile_blocks()
    optimizer = DeepSeekAdam(
        decay_groups(model, optim.weight_decay), lr=optim.lr, betas=optim.betas, moments=optim.moments,
        master=optim.master_weights, kernels=kernels,
    )  # fmt: skip
    clip = GradClip(optim.clip_norm)
    if sliced:
        tracker = MemoryTracker("cpu")
        executor = layer_major_executor(
            ExecutorInputs(
                recipe, model, optimizer, None, clip, None, None, tracker, kernels, World.alone(), folder, values
            )
        )
        executor.memory_tracker = (
            None  # its phases reset the mark of the largest resident set, which the benchmark reads
        )
    else:
        executor = StandardExecutor(model, optimizer, clip=clip)
    return lambda count: executor.step(microbatches(count, vocab), optim.lr).loss


# ---- theirs ----


def _llama(recipe: Any, dtype: torch.dtype, compiled: bool) -> Any:
    """Hugging Face's Llama of the recipe's shape, with the weights that our rows start from."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tilewright.models.build import build_model, random_values

    shape, vocab = recipe.model, recipe.data.vocab_size
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_heads,
        max_position_embeddings=SEQ, rms_norm_eps=shape.norm_eps, rope_theta=shape.rope_theta,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    values = random_values(build_model(shape, vocab, device="meta"), recipe.run.seed)
    with torch.no_grad():
        values({name: param.data for name, param in model.named_parameters()})
    model.train()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    return model


def _plain(name: str, compiled: bool, tiny: bool) -> Step:
    """The loop of a first tutorial."""
    recipe = recipe_of(name, tiny)
    optim, vocab = recipe.optim, recipe.data.vocab_size
    model = _llama(recipe, torch.float32, compiled)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )

    def step(count: int) -> float:
        total = 0.0
        for batch in microbatches(count, vocab):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "autocast"):
                logits = model(input_ids=batch["input_ids"]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
            (loss / MICRO).backward()
            total += loss.item() / MICRO
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def _peer(name: str, compiled: bool, tiny: bool) -> Step:
    """The loop of who has read how to save memory.

    In the backward pass there is neither clipping, whose norm is not known yet, nor accumulation: all rows are one
    batch, and each parameter is updated as soon as its gradient is there.
    """
    from torchao.optim import AdamW8bit

    recipe = recipe_of(name, tiny)
    optim, vocab = recipe.optim, recipe.data.vocab_size
    model = _llama(recipe, torch.bfloat16, compiled)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    chunk_loss = torch.compile(_chunk_loss) if compiled else _chunk_loss
    make = partial(
        AdamW8bit, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, bf16_stochastic_round=True
    )

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        """The summed loss, its logits in chunks that backward computes again."""
        x_ND = model.model(input_ids=batch["input_ids"]).last_hidden_state.flatten(0, 1)
        pieces = zip(x_ND.split(CHUNK), batch["labels"].flatten().split(CHUNK), strict=True)
        weight = model.lm_head.weight
        losses = [checkpoint(chunk_loss, rows, weight, labels, use_reentrant=False) for rows, labels in pieces]
        return torch.stack(losses).sum()

    if name == "peer":
        optimizer = make(model.parameters())

        def step(count: int) -> float:
            total = 0.0
            for batch in microbatches(count, vocab):
                loss = loss_of(batch) / (MICRO * ROWS * SEQ)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return step

    optimizers = {param: make([param]) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad(set_to_none=True)

    for param in optimizers:
        param.register_post_accumulate_grad_hook(update)

    def step_whole(count: int) -> float:
        batches = microbatches(count, vocab)
        loss = loss_of({key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}) / (MICRO * ROWS * SEQ)
        loss.backward()
        return loss.item()

    return step_whole


def _chunk_loss(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x_ND @ weight_VD.T).float(), labels_N, reduction="sum")
