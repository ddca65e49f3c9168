"""The share of its matmuls' rate that a step reaches, and who owns its seconds, compiled and eager, of two decoders.

Each case is `tilewright bench step --json` in a process of its own, on the default recipe's text: matmuls of the step's
own shapes are timed alone there, in turns with its steps. One decoder is ours, with 47 or 209 million parameters (12
layers of 512, 15 of 1024; vocabulary 16,384; 4,096 tokens per step, AdamW); one is transformers' Llama of the first
shape. A machine that others use gives shares that are too small: `others` says how much they took.

python -m benchmarks.runs.step_share [CASE ...] [--steps 7] [--threads 0] [--tiny]
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import machine_kind, parser_of, write_result

CLAIM = "a compiled step reaches at least 0.65 of its matmuls' rate on AVX-512, 0.75 on AVX2, 0.50 on AMX"
SIZES = {"47m": (512, 12, 8, 1408), "209m": (1024, 15, 16, 2816), "tiny": (64, 2, 2, 128)}
"""Width, layers, heads, width of the FFN."""
CASES = {
    f"{size} {model} {mode}": (size, model, mode)
    for size, model in (("47m", "ours"), ("47m", "llama"), ("209m", "ours"))
    for mode in ("compiled", "eager")
}
KEPT = ("step_s", "tokens_per_s", "matmuls", "explained", "owners", "others", "planned_s")


def settings_of(size: str, model: str, mode: str, folder: str) -> list[str]:
    """The command line's settings of a case; of a foreign model its configuration is written to `folder`."""
    dim, layers, heads, ffn = SIZES[size]
    tiny = size == "tiny"
    vocab = 512 if tiny else 16384
    settings = {
        "data.vocab_size": vocab, "data.seq_len": 32 if tiny else 512, "data.max_bytes": "1MB" if tiny else "24MB",
        "optim.kind": "adamw", "optim.lr": "3e-4", "train.compile": "on" if mode == "compiled" else "off",
        "train.global_batch_size": 8, "train.micro_batch_size": 8, "precision.mode": "bf16_mixed",
    }  # fmt: skip
    if model == "llama":
        from transformers import LlamaConfig

        LlamaConfig(
            vocab_size=vocab, hidden_size=dim, intermediate_size=ffn, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512, tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip
        settings |= {"model.kind": "hf", "model.path": folder, "model.weights": "random"}
    else:
        settings |= {"model.dim": dim, "model.num_layers": layers, "model.num_heads": heads, "model.ffn_dim": ffn}
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def measured(size: str, model: str, mode: str, steps: int, threads: int) -> dict[str, Any]:
    """What `bench step` says of a case."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["bench", "step", "default", "--json", "--steps", str(steps), *settings_of(size, model, mode, folder)]
        command += ["--run.threads", str(threads)]
        done = subprocess.run(
            [sys.executable, "-m", "tilewright", *command], stdout=subprocess.PIPE, text=True, check=True
        )
    found = json.loads(done.stdout)
    return {name: found[name] for name in KEPT}


def main() -> None:
    """Measure, and write the result."""
    asked = parser_of(__doc__, list(CASES), tiny=True, steps=7, threads=0).parse_args()
    results: dict[str, Any] = {}
    for name in asked.cases:
        size, model, mode = CASES[name]
        found = results[name] = measured("tiny" if asked.tiny else size, model, mode, asked.steps, asked.threads)
        share = found["matmuls"]["share"]
        print(
            f"{name}: {found['tokens_per_s']:,.0f} tokens/s, {share:.2f} of the rate, named owners have "
            f"{100 * found['explained']:.1f} %, others took {100 * found['others']:.0f} % of the processors",
            flush=True,
        )
    for pair, (first, second) in {
        "eager over compiled": ("47m ours eager", "47m ours compiled"),
        "llama over ours, compiled": ("47m llama compiled", "47m ours compiled"),
        "llama over ours, eager": ("47m llama eager", "47m ours eager"),
    }.items():
        if first in results and second in results:
            results[pair] = results[first]["tokens_per_s"] / results[second]["tokens_per_s"]
            print(f"{pair}: {results[pair]:.2f}")
    write_result(f"step_share_{'tiny' if asked.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
