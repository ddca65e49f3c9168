"""Adapters on an 8-bit base beside peft's on a BF16 base: memory of the device and seconds of a step.

A Hugging Face Llama with layers of the 8B model's size, as many as initialise in seconds, random weights, every layer
recomputed, adapters of rank 16 on all linear layers, the same packed rows. Each contender is a process of its own:

  lora_fp8    tilewright, `lora.base = "fp8"`, precision fp8_tile
  lora_bf16   tilewright, `lora.base = "keep"`, BF16 weights
  peft_bf16   peft 0.18 or later on the same model in BF16, gradient checkpointing, fused AdamW

Peaks are of the steps: weights are random, and making them is no part of a fine-tune.

python -m benchmarks.card.lora_gpu [--steps 8] [--tiny]
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.memory_gpu import DEVICE, device_peak_bytes, host_peak_bytes
from benchmarks.common import Deadline, arguments_for_card, parser_of, spread, write_result
from benchmarks.worker import call_worker
from tilewright.core.config.load import load_recipe
from tilewright.data.batches.microbatches import Batch, count_tokens
from tilewright.training.assemble import Components, build, set_up

CLAIM = "adapters on an FP8 base take less device memory than peft's on BF16, and at most 1.2x the time of a step"
CONTENDERS = ("lora_fp8", "lora_bf16", "peft_bf16")
LLAMA = {
    "model_type": "llama", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY_LLAMA = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
RUN = {
    "model.kind": "hf", "model.task": "causal_lm", "lora.rank": "16", "optim.kind": "adamw", "optim.lr": "1e-4",
    "optim.master_weights": "stochastic", "train.activation_checkpoint": "full", "train.compile": "off",
    "data.seq_len": "2048", "train.global_batch_size": "4", "train.micro_batch_size": "4", "plan.enforce": "false",
}  # fmt: skip
TINY_RUN = {
    "run.device": "auto", "data.seq_len": "64", "data.vocab_size": "512", "data.max_bytes": "2MB",
    "train.global_batch_size": "2", "train.micro_batch_size": "2",
}  # fmt: skip
BASES = {
    "lora_fp8": {"lora.base": "fp8", "precision.mode": "fp8_tile"},
    "lora_bf16": {"lora.base": "keep", "precision.mode": "bf16_mixed"},
}
Step = Callable[[list[Batch]], float]


def parts_of(folder: Path, settings: dict[str, str], tiny: bool) -> Components:
    """A run of ours on the model in `folder`, before its first step."""
    every = RUN | {"model.path": str(folder)} | settings | (TINY_RUN if tiny else {})
    return build(set_up(load_recipe("cpu_10m", every, environ={})), fresh=True)


def ours(folder: Path, name: str, tiny: bool) -> tuple[Step, Iterator[list[Batch]]]:
    """Our adapters."""
    parts = parts_of(folder, BASES[name], tiny)
    return lambda batch: parts.executor.step(batch, 1e-4).loss, iter(parts.stream.next_step, None)


def peft_bf16(folder: Path, tiny: bool) -> tuple[Step, Iterator[list[Batch]]]:
    """peft's adapters, in a loop of its documentation's kind."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = parts_of(small_copy(folder), BASES["lora_bf16"], tiny)  # the same rows; its model is not used
    with torch.device(DEVICE):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    net.config.use_cache = False
    net.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(net, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: list[Batch]) -> float:
        total = 0.0
        for micro in batch:
            logits = model(input_ids=micro["input_ids"].to(DEVICE)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), micro["labels"].to(DEVICE).flatten())
            (loss / len(batch)).backward()
            total += float(loss.detach()) / len(batch)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, iter(rows.stream.next_step, None)


def small_copy(folder: Path) -> Path:
    """The model with one narrow layer: what our data pipeline asks of a model at little cost."""
    small = folder / "small"
    small.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    sizes = {**TINY_LLAMA, "vocab_size": config["vocab_size"], "num_hidden_layers": 1}
    (small / "config.json").write_text(json.dumps(config | sizes))
    return small


def contend(name: str, folder: Path, steps: int, tiny: bool) -> dict[str, Any]:
    """A contender's steps: the first two warm up."""
    try:
        step, batches = peft_bf16(folder, tiny) if name == "peft_bf16" else ours(folder, name, tiny)
    except ImportError as error:
        return {"not_run": f"{error.name} cannot be imported"}
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds, tokens = [], [], 0
    for _ in range(steps):
        batch = next(batches)
        tokens = count_tokens(batch)
        started = time.perf_counter()
        losses.append(step(batch))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "losses": losses,
        "tokens_per_step": tokens,
        "step_s": spread(seconds[2:] or seconds),
        "device_peak_bytes": device_peak_bytes(),
        "host_peak_bytes": host_peak_bytes(),
    }


def main() -> None:
    """All contenders, one after the other."""
    parser = parser_of(__doc__, tiny=True, seconds=True, steps=8)
    parser.add_argument("--worker", choices=CONTENDERS, help="for a process of its own")
    parser.add_argument("--folder", type=Path, help="for a process of its own")
    args = arguments_for_card(parser)
    steps = min(args.steps, 4) if args.tiny and DEVICE == "cpu" else args.steps
    torch.manual_seed(0)
    if args.worker:
        print(json.dumps(contend(args.worker, args.folder, steps, args.tiny)))
        return
    deadline = Deadline(args.seconds)
    config = LLAMA | (TINY_LLAMA if args.tiny else {})
    results: dict[str, Any] = {"shape": config}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for index, name in enumerate(CONTENDERS):
            if deadline.passed(name, results):
                break
            more = ["--worker", name, "--folder", folder, "--steps", str(steps), *["--tiny"] * args.tiny]
            results[name] = call_worker("card.lora_gpu", *more, timeout_s=deadline.share(len(CONTENDERS) - index))
            print(f"{name}: {json.dumps(results[name])[:300]}", flush=True)
            write_result("lora", CLAIM, results)


if __name__ == "__main__":
    main()
