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

from benchmarks.loops import Batch, executor_of, hf_llama, token_batch

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
        ("tilewright.training.executor.executor_kinds",)
        if name in OURS
        else ("transformers.models.llama.modeling_llama",)
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


def microbatches(step: int, vocab: int) -> list[Batch]:
    """The rows of a step."""
    return [token_batch(vocab, ROWS, SEQ, 100 * (step % TEXTS) + micro) for micro in range(MICRO)]


# ---- ours ----


def _ours(name: str, compiled: bool, tiny: bool) -> Step:
    """Our decoder under the recipe's formats, optimizer and executor."""
    recipe = recipe_of(name, tiny)
    executor = executor_of(recipe, compiled, Path("runs") / "benchmark")
    executor.memory_tracker = None  # its phases reset the mark of the largest resident set, which the benchmark reads
    return lambda count: executor.step(microbatches(count, recipe.data.vocab_size), recipe.optim.lr).loss


# ---- theirs ----


def _llama(recipe: Any, dtype: torch.dtype, compiled: bool) -> Any:
    """Hugging Face's Llama of the recipe's shape, with the weights that our rows start from."""
    from transformers import AutoModelForCausalLM

    from tilewright.models.build import build_model, random_values

    shape, vocab = recipe.model, recipe.data.vocab_size
    sizes = {"dim": shape.dim, "ffn": shape.ffn_dim, "layers": shape.num_layers, "heads": shape.num_heads}
    more = {"kv_heads": shape.num_heads, "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta}
    config = hf_llama(vocab, SEQ, **sizes, **more)
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
