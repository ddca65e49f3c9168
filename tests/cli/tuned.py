"""A small model to fine-tune, of two architectures, and fifty conversations with answers that can be learned."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.data.chat.families import make_folder

SHAPE = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
PLACES = ("Paris", "weather", "system", "questions", "answers")


def make_model(folder: Path, name: str, template: bool = True) -> Path:
    """A model's folder with a small tokenizer and the ChatML template."""
    make_folder(folder, "chatml", template)
    config, net = MODELS[name]
    torch.manual_seed(0)
    net(config(**SHAPE)).save_pretrained(folder)
    return folder


def make_talks(file: Path, count: int = 50) -> Path:
    """Conversations of one or two turns; what is answered follows from what is asked."""
    lines = []
    for i in range(count):
        turns = []
        for place in (PLACES[i % 5], PLACES[(i // 5) % 5])[: 1 + i % 2]:
            turns += [{"role": "user", "content": f"hello {place} {i}?"}]
            turns += [{"role": "assistant", "content": f"Yes, the {place}!"}]
        lines.append(json.dumps({"messages": turns}))
    file.write_text("\n".join(lines) + "\n")
    return file


def arguments(tmp_path: Path, **changes: object) -> list[str]:
    """Settings under which a fine-tune takes seconds; `changes` as section__field=value."""
    values = {
        "run.dir": tmp_path / "runs",
        "run.name": "tuned",
        "run.threads": 1,
        "run.device": "cpu",
        "data.cache_dir": tmp_path.parent / "cache",  # shared: what a fine-tune forgets is prepared once
        "data.eval_source": "",
        "data.seq_len": 64,
        "data.holdout": 0.1,
        "train.steps": 6,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
        "train.compile": "off",
        "train.log_interval": 1,
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "optim.lr": 1e-2,
        "log.report": "false",
        "ops.cross_entropy": "ref",
        "ops.adam": "ref",
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@torch.no_grad()
def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of transformers, in FP32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
