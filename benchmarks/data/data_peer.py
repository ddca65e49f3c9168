"""`tilewright data build` against datatrove on two cores: read, rules, MinHash near-copies, write; and with tokens.

python -m benchmarks.data.data_peer --peer ENVIRONMENT/bin/python [--megabytes 75] [--pairs 3]

Both read the same shards of JSON lines with the same rules (Gopher's, of runs of words those that both have) and
write what stays as Parquet. datatrove's job is `benchmarks.data.datatrove_job`, in an environment of its own (`pip
install "datatrove[processing,io]==0.10.0" spacy`), with words split at white space, as tilewright's are, so that both
drop about the same texts. (`--jobs` has spaCy's words too, datatrove's default for English: slower, and the rules then
drop nearly all code.) Without tokens tilewright runs the stages of a build up to the last search for copies, and writes
the records that stay. With tokens it is the command, and both encode with one tokenizer. The jobs take turns; each is a
process with its start.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Stolen, machine_kind, spread, write_result
from benchmarks.data.data_stages import QUALITY, REPETITION, build_command, run_until, stage_seconds, total, write_toml
from benchmarks.data.data_texts import MB, write_shards

CLAIM = "read, rules, near-copies and Parquet on two cores take less time than in datatrove, and with tokens no more"
PROCESSES = 2
BUCKETS, HASHES = 14, 8
"""datatrove's own bands: half of the pairs of similarity 0.72 are found."""
THRESHOLD = 0.72
JOBS = {
    "tilewright": ("space", False),
    "datatrove": ("space", False),
    "datatrove, spaCy's words": ("spacy", False),
    "tilewright, tokens": ("space", True),
    "datatrove, tokens": ("space", True),
    "datatrove, spaCy's words, tokens": ("spacy", True),
}
AGAINST = (
    ("tilewright", "datatrove"),
    ("tilewright", "datatrove, spaCy's words"),
    ("tilewright, tokens", "datatrove, tokens"),
    ("tilewright, tokens", "datatrove, spaCy's words, tokens"),
)


def build_without_tokens(toml: Path, out: Path) -> None:
    """The stages up to the last search for copies, and the records that stay as Parquet, a file a shard."""
    from tilewright.data.engine.build_settings import load_data_toml

    context = run_until(load_data_toml(toml), out, PROCESSES, "unique")
    (out / "records").mkdir()
    spawn = multiprocessing.get_context("spawn")
    jobs = [
        (str(context.folder("repair", i)), str(context.folder("unique", i)), str(out / "records" / f"{i:05}.parquet"))
        for i in range(context.num_shards)
    ]
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, spawn) as pool:
        list(pool.map(write_records, *zip(*jobs, strict=True)))


def write_records(repaired: str, kept: str, out: str) -> None:
    """In a worker: the records of a shard that stay."""
    import numpy as np

    from tilewright.data.engine.record_tables import RECORDS, TableWriter
    from tilewright.data.stages.copies.sketches import surviving_texts

    columns = tuple(name for name in RECORDS.names if name != "text")
    with TableWriter(Path(out), RECORDS) as writer:
        none = np.zeros(0, np.int64)
        for _, texts, others in surviving_texts(Path(repaired), Path(kept), none, columns):
            for number, text in enumerate(texts):
                writer.append({"text": text} | {name: values[number] for name, values in others.items()})


def run_job(name: str, source: Path, folder: Path, peer: str, tokenizer: Path) -> dict[str, Any]:
    """One job: wall and processor seconds, and what it counted."""
    words, tokens = JOBS[name]
    out = folder / "out"
    if name.startswith("tilewright"):
        write_toml(folder / "data.toml", **_sections(source, tokenizer))
        command = build_command(folder / "data.toml", out, PROCESSES)
        if not tokens:
            command = [
                sys.executable,
                "-m",
                "benchmarks.data.data_peer",
                "--without-tokens",
                str(folder / "data.toml"),
                str(out),
            ]
    else:
        job = Path(__file__).with_name("datatrove_job.py")
        command = [peer, str(job), str(source), str(out), "--words", words, "--workers", str(PROCESSES)]
        command += ["--buckets", str(BUCKETS), "--hashes", str(HASHES)]
        command += ["--tokenizer", str(tokenizer / "tokenizer.json")] if tokens else []
    with (folder / "told").open("w") as told, (folder / "log").open("w") as log, Stolen() as stolen:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=told, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
    process.returncode = status
    if status:
        raise SystemExit(f"{name} ended with status {status}: {(folder / 'log').read_text()[-3000:]}")
    row = {"wall_s": wall, "processor_s": usage.ru_utime + usage.ru_stime, "stolen": stolen.share}
    counted = _ours(out) if name.startswith("tilewright") else _theirs((folder / "told").read_text())
    return row | {"counts": counted}


def _sections(source: Path, tokenizer: Path) -> dict[str, dict[str, Any]]:
    return {
        "read": {"source": str(source), "max_chars": 2**31 - 1},  # datatrove does not cut texts
        "rules": QUALITY | REPETITION,
        "duplicates": {"threshold": THRESHOLD},
        "tokenizer": {"path": str(tokenizer)},
    }


def _ours(out: Path) -> dict[str, Any]:
    return {
        "documents": total(out, "read", "records"),
        "dropped_by_rules": total(out, "rules", "rejects"),
        "exact_copies": total(out, "unique", "exact"),
        "near_copies": total(out, "unique", "near"),
        "written": total(out, "unique", "records"),
        "tokens": sum(total(out, "encode", f"{part}_tokens") for part in ("train", "holdout")),
        "stage_s": stage_seconds(out),
    }


def _theirs(told: str) -> dict[str, Any]:
    found = json.loads(told.splitlines()[-1])
    first, last = found["stats"]["filter and sign"], found["stats"]["write"]

    def of(stats: dict[str, Any], word: str) -> dict[str, Any]:
        return next(one for name, one in stats.items() if word in name)

    read, unique = of(first, "Jsonl"), of(last, "MinHash")
    return {
        "documents": read["documents"]["total"],
        "dropped_by_rules": sum(of(first, word).get("dropped", 0) for word in ("Repetition", "Quality")),
        "near_copies": unique.get("dropped", 0),
        "written": unique["forwarded"],
        "tokens": of(last, "Writer")["tokens"]["total"] if any("TOKENIZER" in name for name in last) else 0,
        "step_s": found["steps"],
    }


def make_tokenizer(source: Path, folder: Path) -> Path:
    """A tokenizer of 8192 words from the first shard, for all jobs."""
    from tilewright.data.common.tokenizer import train_tokenizer

    lines = next(iter(sorted(source.glob("*.jsonl")))).read_text(encoding="utf-8").splitlines()
    train_tokenizer(iter([json.loads(line)["text"] for line in lines]), 8192).save(folder)
    return folder


def main() -> None:
    """Run the jobs in turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="Python of an environment with datatrove")
    parser.add_argument("--megabytes", type=int, default=75)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--inputs", type=Path, help="folder that keeps the input, for other runs")
    parser.add_argument("--jobs", nargs="+", default=[n for n in JOBS if "spaCy" not in n], choices=list(JOBS))
    parser.add_argument("--without-tokens", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.without_tokens:
        build_without_tokens(*args.without_tokens)
        return
    version = subprocess.run(
        [args.peer, "-c", "from importlib.metadata import version; print(version('datatrove'))"], capture_output=True
    )
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in args.jobs}
    with tempfile.TemporaryDirectory(prefix="data-peer-", dir=args.inputs) as name:
        base = Path(name).resolve()
        source = (args.inputs or base).resolve() / str(args.megabytes)
        if not source.exists():
            write_shards(source, args.megabytes * MB)
        size = sum(path.stat().st_size for path in source.glob("*.jsonl"))
        tokenizer = make_tokenizer(source, base / "tokenizer")
        for turn in range(args.pairs):
            for job in args.jobs[:: 1 if turn % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    samples[job].append(run_job(job, source, Path(folder), args.peer, tokenizer))
                print(job, json.dumps(samples[job][-1]), flush=True)
            results = summed(samples, size) | {"datatrove": version.stdout.decode().strip()}
            write_result(f"data_peer_{machine_kind()}", CLAIM, results)  # after each turn: a run may be cut short


def summed(samples: dict[str, list[dict[str, Any]]], input_bytes: int) -> dict[str, Any]:
    """Rates of each job, and how many times faster ours is, turn by turn, by wall and by processor seconds."""
    jobs, ratios = {}, {}
    for name, rows in samples.items():
        jobs[name] = {
            "mb_per_s": spread([input_bytes / MB / row["wall_s"] for row in rows]),
            "mb_per_processor_s": spread([input_bytes / MB / row["processor_s"] for row in rows]),
            "stolen": max(row["stolen"] for row in rows),
            "counts": rows[-1]["counts"],
        }
    for ours, theirs in AGAINST:
        if ours in samples and theirs in samples:
            pairs = list(zip(samples[ours], samples[theirs], strict=True))
            ratios[f"{ours} over {theirs}"] = {
                "wall": spread([b["wall_s"] / a["wall_s"] for a, b in pairs]),
                "processor": spread([b["processor_s"] / a["processor_s"] for a, b in pairs]),
            }
    return {"input_bytes": input_bytes, "processes": PROCESSES, "threshold": THRESHOLD, "bands": [BUCKETS, HASHES],
            "jobs": jobs, "ratios": ratios}  # fmt: skip


if __name__ == "__main__":
    main()
