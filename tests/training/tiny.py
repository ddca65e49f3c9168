"""A run so small that a step takes milliseconds, and what is compared of it."""

import json
from pathlib import Path

import torch

from tilewright.core.config.load import Loaded, load_recipe
from tilewright.data.common.tokenizer import train_tokenizer
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors

WORDS = "tile scale block layer token matrix sum row column loss step norm weight bias".split()  # noqa: SIM905


def write_text(folder: Path) -> Path:
    """Two domains of documents that differ from each other."""
    generator = torch.Generator().manual_seed(3)
    for domain in ("alpha", "beta"):
        (folder / domain).mkdir(parents=True)
        for number in range(30):
            picks = torch.randint(0, len(WORDS), (200,), generator=generator).tolist()
            text = " ".join(WORDS[i] for i in picks)
            (folder / domain / f"{number}.txt").write_text(f"{domain} {number}. {text}.\n")
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of at most 300 entries for a folder whose weights a tiny run loads."""
    train_tokenizer([" ".join(WORDS) * 50], 300).save(folder)


def settings(data: Path, runs: Path, **changes: object) -> dict[str, str]:
    """Overrides of the tiny run; `changes` as section__field=value."""
    values = {
        "run.dir": runs,
        "run.name": "tiny",
        "run.threads": 1,
        "run.device": "cpu",
        "model.dim": 32,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "data.source": data / "text",
        "data.cache_dir": data / "cache",
        "data.vocab_size": 300,
        "data.seq_len": 32,
        "data.holdout": 0.2,
        "train.steps": 6,
        "train.global_batch_size": 5,
        "train.micro_batch_size": 2,
        "train.compile": "off",
        "train.log_interval": 2,
        "train.eval_interval": 3,
        "train.eval_batches": 1,
        "train.sample_tokens": 4,
        "optim.warmup_steps": 2,
        "checkpoint.interval": 2,
        "energy.idle_seconds": 0,
        "ops.cross_entropy": "ref",  # the default ones are compiled, seconds in each process; `test_kill` has them
        "ops.adam": "ref",
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: str(value) for name, value in values.items()}


def tiny(data: Path, runs: Path, **changes: object) -> Loaded:
    """The recipe of the tiny run."""
    return load_recipe(None, settings(data, runs, **changes), environ={})


def rows(path: Path) -> list[dict]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_state(run: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and meta of the newest checkpoint, which must be sound."""
    store = CheckpointStore(run / "checkpoints")
    path, rejected = store.newest_sound()
    assert rejected == []
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored_tensors(path).items()}
    read_tensors(path, tensors)
    store.close()
    return tensors, read_meta(path)


def assert_same_run(run: Path, reference: Path, *, matmuls: bool = True) -> None:
    """Final state bitwise equal, and the same rows of metrics, each once.

    Args:
        run: folder.
        reference: folder.
        matmuls: as many matmuls were executed, too; not so where one of them computed some again.
    """
    # `timeout` stops the tests with one SIGTERM: a run that is under way takes it, and the tests go on.
    ends = [rows(folder / "events.jsonl")[-1] for folder in (run, reference)]
    assert ends[0]["kind"] == "stop" or ends[1]["kind"] != "stop", f"the reference was stopped: {ends[1]['message']}"
    (tensors, meta), (expected, expected_meta) = last_state(run), last_state(reference)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (tensors[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
        assert torch.equal(tensors[name], tensor), f"{name} is off by up to {difference}"
    for record in (meta, expected_meta):
        for name in ("elapsed_s", "step_s", "began_unix", "paused_unix"):
            del record["parts"]["counters"][name]
        del record["recipe"]
        if not matmuls:
            del record["parts"]["audit"]
    assert meta == expected_meta
    measured = ("time_s", "tokens_per_s", "step_s", "wait_s", "wait_share", "memory_bytes", "memory")
    measured += ("read_s", "prepare_s", "fetched_bytes", "fetch_s")
    measured += ("memory_phases", "memory_tiers", "energy_j", "energy_j_per_step")
    written = [rows(folder / "metrics.jsonl") for folder in (run, reference)]
    timed = ("exchange_exposed_s", "exchange_hidden_s")
    measured += tuple(name for row in written[0] + written[1] for name in row if name.startswith(timed))
    lines = [{row["step"] for row in found if "train_domains" in row} for found in written]
    assert lines[0] >= lines[1]
    if lines[0] != lines[1]:  # one that ended earlier had a line there: losses by domain are since the line before
        measured += ("train_domains",)
    strip = [[{key: value for key, value in row.items() if key not in measured} for row in found] for found in written]
    assert strip[0] == strip[1]
