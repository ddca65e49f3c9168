"""One short real run, and everything about it that a setting could change. For `test_settings`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from tests.machine import fixed_ceilings as fixed_ceilings
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import TilewrightError
from tilewright.training.session import train

TIMED = (
    "time_s",
    "step_s",
    "wait_s",
    "wait_share",
    "read_s",
    "prepare_s",
    "tokens_per_s",
    "memory_bytes",
    "memory",
    "seconds",
    "stall_s",
)
WORDS = (
    "a",
    "red",
    "blue",
    "cat",
    "dog",
    "runs",
    "sleeps",
    "under",
    "over",
    "quickly",
    "house",
    "tree",
    "river",
    "stone",
)


def write_texts(folder: Path) -> None:
    """Two domains of short made-up documents, plain and as rows with two fields."""
    generator = torch.Generator().manual_seed(0)
    for domain, repeats in (("code", 1), ("prose", 2)):
        (folder / domain).mkdir(parents=True)
        for number in range(40):
            picks = torch.randint(len(WORDS), (60 * repeats,), generator=generator).tolist()
            text = " ".join(WORDS[pick] for pick in picks)
            (folder / domain / f"{number}.txt").write_text(f"{domain} {number} {text}.\n")
    rows = [{"text": f"first {n} " + "alpha beta " * 30, "other": f"second {n} " + "gamma " * 50} for n in range(40)]
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [{"prompt": f"question {n} of alpha?", "completion": f"beta {n} gamma"} for n in range(40)]
    (folder.parent / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))


def write_llama(folder: Path) -> None:
    """A Hugging Face folder with the configuration of a tiny Llama, and no weights."""
    folder.mkdir()
    shape = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads}
    (folder / "config.json").write_text(json.dumps(config))


def observe(settings: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Runs training with these settings in an empty folder; what came out, by name.

    `error` holds the class of an error that a user would see, and the rest is then missing.
    """
    before = torch.get_num_threads()
    try:
        result = train(load_recipe(None, settings, {}))
    except TilewrightError as error:
        return {"error": type(error).__name__}
    finally:
        threads = torch.get_num_threads()
        torch.set_num_threads(before)
    run = result.run_dir
    metrics = _lines(run / "metrics.jsonl")
    events = _lines(run / "events.jsonl")
    files = [path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    return {
        "error": None,
        "path": str(run.relative_to(folder.resolve())) if run.is_relative_to(folder.resolve()) else str(run),
        "threads": threads,
        "weights": _weights(run),
        "steps": [{k: v for k, v in row.items() if k not in TIMED} for row in metrics if "eval" not in row],
        "shown": [row["step"] for row in metrics if "memory" in row],
        "evals": [(row["step"], row["eval"]) for row in metrics if "eval" in row],
        "others": [row.get("eval_other") for row in metrics if "eval" in row],
        "events": [(row["step"], row["kind"]) for row in events],
        "saves": [row.get("background") for row in events if row["kind"] == "save"],
        "checkpoints": [path.name for path in sorted((run / "checkpoints").iterdir())],
        "files": sorted({path.relative_to(run).parts[0] for path in files}),
        "siblings": sorted(path.name for path in run.parent.iterdir()),
        "data": {k: v for k, v in _read(run / "data.json").items() if k not in TIMED},
        "kernels": _read(run / "machine.json")["kernels"],
        "precision": _read(run / "precision.json"),
        "plan": _read(run / "plan.json"),
        "samples": [{k: v for k, v in row.items() if k not in TIMED} for row in _lines(run / "samples.jsonl")],
    }


def _weights(run: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and a digest of every tensor of the model in the newest checkpoint."""
    reader = dcp.FileSystemReader(max((run / "checkpoints").iterdir()))
    stored = reader.read_metadata().state_dict_metadata.items()
    model = {name: entry for name, entry in stored if name.startswith("model.")}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in model.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name: (tuple(t.shape), str(t.double().sum().item())) for name, t in sorted(tensors.items())}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
