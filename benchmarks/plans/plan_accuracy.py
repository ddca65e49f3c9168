"""Claim: the plan's peak memory is within 10 % of the measured one, for all shipped recipes, two Hugging Face models,
and FP8 in eager mode, at checkpoint boundaries and in a Hugging Face model.

Each recipe runs `tilewright train RECIPE --dry-run` in a process of its own: two real steps on real data, whose last
lines are the plan beside the memory tracker's measurement. A first pass, not counted, prepares and caches the data,
because preparing it leaves pages in the process. Seconds are recorded too, but depend on how busy the machine is.

    python -m benchmarks.plans.plan_accuracy [RECIPE ...]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import parser_of, write_result
from tilewright.core.config.toml import RECIPES
from tilewright.core.units import parse_bytes

LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6,
    "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "other", "peak")


def cases(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of `tilewright train`."""
    found = {path.stem: [path.stem] for path in sorted(RECIPES.glob("*.toml"))}
    found["fp8_tile_eager"] = ["fp8_tile", "--train.compile", "off"]
    inputs = ["--train.activation_checkpoint", "full", "--train.checkpoint_inputs", "fp8"]
    found["default_fp8_inputs"] = ["cpu_10m", *inputs]
    for config, task in ((LLAMA, "causal_lm"), (BERT, "masked_lm")):
        name = f"hf_{config['model_type']}"
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        arguments = ["--model.kind", "hf", "--model.path", str(folder / name), "--model.task", task]
        found[name] = ["cpu_10m", *arguments]
        if task == "causal_lm":
            found[f"{name}_fp8"] = ["fp8_tile", *arguments]
    return found


def dry_run(arguments: list[str]) -> dict[str, Any]:
    """Planned and measured bytes by owner, and seconds of a step, as the command prints them."""
    command = [sys.executable, "-m", "tilewright", "train", *arguments, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return parse(done.stdout)


def parse(text: str) -> dict[str, Any]:
    """The table at the end of a dry run: rows of a name, planned and measured, each with its unit."""
    found: dict[str, Any] = {"planned": {}, "measured": {}}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 5 and words[0] in OWNERS:
            found["planned"][words[0]] = parse_bytes("".join(words[1:3]))
            found["measured"][words[0]] = parse_bytes("".join(words[3:5]))
        elif words[:1] == ["step"] and not line.startswith("step 1:") and not line.startswith("step 2:"):
            found["step_planned_measured"] = line.removeprefix("step").strip()
    peak = found["measured"]["peak"]
    found["error"] = round(found["planned"]["peak"] / peak - 1, 4)
    return found


def main() -> None:
    """Run all cases, or those named, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        known = cases(Path(folder))
        wanted = {name: known[name] for name in parser_of(__doc__, known).parse_args().cases}
        results = {}
        for name, arguments in wanted.items():
            dry_run(arguments)
            results[name] = dry_run(arguments)
            print(
                f"{name:<16} {results[name]['error']:+.1%}  {results[name]['planned']['peak'] / 2**20:.0f} MiB planned"
            )
    worst = max(results, key=lambda name: abs(results[name]["error"]))
    summary = {"cases": results, "worst": worst, "worst_error": results[worst]["error"]}
    write_result("plan_accuracy", "planned peak memory is within 10 % of the measured one", summary)


if __name__ == "__main__":
    main()
