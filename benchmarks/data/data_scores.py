"""The stages of a data build that score records: how much planted noise goes, how much else, and how fast they are.

Text of the installed Python (a module is a record of `code`, a docstring one of `prose`), 10 % of it turned into
noise: words in random order, a bad scan, menus, base64 and hex, random signs, and words whose letters are shuffled. Of
the last kind nothing is trained on; recall is the mean of the others.

A build with each stage gives recall by kind and the share of the other records that goes; then each stage that scores
is run again, on one core, for its rate in processor time.

python -m benchmarks.data.data_scores
"""

import ast
import json
import os
import random
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import machine_kind, parser_of, spread, write_result
from tilewright.data.common.progress import ProgressBar
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.executors.local_processes import LocalExecutor
from tilewright.data.engine.run import build_dataset
from tilewright.data.stages.plan import stage_named
from tilewright.data.stages.scores.corruptions import KINDS

CLAIM = "the stages of a data build that score records find planted noise, and each scores 1 MB/s a core or more"
SHARE, ROUNDS, LEAST_CHARS, MOST_CHARS = 0.1, 3, 400, 40_000
CLEAN, SCRAMBLED = "clean", "scrambled"


def scrambled(text: str, key: int) -> str:
    """The letters of each word in random order."""
    rng = random.Random(key)
    return " ".join("".join(rng.sample(word, len(word))) for word in text.split(" "))


MAKERS = KINDS | {SCRAMBLED: scrambled}


def modules() -> Iterator[tuple[str, str]]:
    """(domain, text) of the installed Python: its modules, and their docstrings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue  # files that test what a parser refuses
        yield "code", text
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield "prose", ast.get_docstring(node) or ""


def write_corpus(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Files of `in`, a tenth of them noise with the kind in its name; rows of examples in `good` and `bad`.

    `seed` draws which texts are examples and which become noise, and what noise.
    """
    found: dict[str, dict[str, None]] = {"prose": {}, "code": {}}
    for domain, text in modules():
        if LEAST_CHARS <= len(text) <= MOST_CHARS:
            found[domain].setdefault(text)
    rng, facts = random.Random(seed), {}
    key = seed * 1_000_000
    examples: dict[str, list[str]] = {"good": [], "bad": []}
    for domain, unique in found.items():
        texts = sorted(unique)
        rng.shuffle(texts)
        num = len(texts) // 5
        examples["good"] += texts[:num]
        kinds = list(KINDS.values())
        examples["bad"] += [kinds[i % len(kinds)](text, key + i) for i, text in enumerate(texts[num : 2 * num])]
        rest = texts[2 * num :]
        (folder / "in" / domain).mkdir(parents=True)
        for i, text in enumerate(rest):
            kind = list(MAKERS)[i % len(MAKERS)] if i < SHARE * len(rest) else CLEAN
            made = text if kind == CLEAN else MAKERS[kind](text, key + i)
            (folder / "in" / domain / f"{i:05}-{kind}.txt").write_text(made, encoding="utf-8")
        facts[domain] = {"records": len(rest), "bytes": sum(len(text.encode()) for text in rest)}
    for name, some in examples.items():
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        facts[name] = len(some)
    return facts


def settings(folder: Path, **sections: dict[str, Any]) -> DataBuild:
    """A build of the corpus without rules, so that only the scores decide."""
    read = {"source": str(folder / "in"), "max_chars": MOST_CHARS}
    return DataBuild.model_validate({"read": read, "tokenizer": {"vocab_size": 1024}, **sections})


def dropped(out: Path, stage: str, source: Path) -> dict[str, Any]:
    """Share of each kind that a stage dropped, of the records that came in."""
    came = Counter(path.stem.partition("-")[2] for path in source.rglob("*.txt"))
    gone: Counter[str] = Counter()
    for file in sorted((out / "rejects").glob("*.parquet")):
        for row in pq.read_table(file, columns=["path", "stage"]).to_pylist():
            if row["stage"] == stage:
                gone[Path(row["path"]).stem.partition("-")[2]] += 1
    shares = {kind: {"records": came[kind], "dropped": round(gone[kind] / came[kind], 4)} for kind in (CLEAN, *MAKERS)}
    known = [shares[kind]["dropped"] for kind in KINDS]
    return {"recall": round(sum(known) / len(known), 4), "lost": shares[CLEAN]["dropped"], "kinds": shares}


def rates(context: Context, stage: str, folder: Path) -> dict[str, Any]:
    """MB of text that a stage scores in a second of processor time, each shard again."""
    found = []
    for number in range(ROUNDS):
        size, seconds = 0, 0.0
        for i in range(context.num_shards):
            place = folder / stage / f"{number}-{i}"
            place.mkdir(parents=True)
            before = time.process_time()
            counts = stage_named(stage).work(context, i)(place)
            seconds += time.process_time() - before
            size += counts["scored_bytes"]
        found.append(size / seconds / 1e6)
    return spread(found)


def training_s(context: Context, stage: str, folder: Path) -> float:
    """Processor seconds in which a stage trains its models."""
    (folder / stage).mkdir(parents=True)
    before = time.process_time()
    stage_named(stage).work(context, 0)(folder / stage)
    return round(time.process_time() - before, 2)


def main() -> None:
    """Build with each stage, and write the result."""
    parser_of(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results: dict[str, Any] = {"removed": {}, "mb_per_s": {}, "training_s": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["corpus"] = write_corpus(folder)
        examples = {"good": str(folder / "good"), "bad": str(folder / "bad")}
        builds = {
            "quality": ("quality", {"quality": examples | {"threshold": 0.5}}),
            "noise, clean text given": ("noise", {"noise": {"clean": examples["good"]}}),
            "noise, clean = corpus": ("noise", {"noise": {"clean": "corpus"}}),
            "noise, clean = corpus, its 99th percentile": ("noise", {}),
            "sample": ("sample", {"sample": {"reference": examples["good"], "weights": (1.0, 0.5, 0.25)}}),
        }
        for number, (title, (stage, sections)) in enumerate(builds.items()):
            out = folder / f"out{number}"
            if not sections:  # what a quantile would do, where the reference holds noise
                file = folder / f"out{number - 1}" / "work/noise_models/00000/contrasts.json"
                contrasts = json.loads(file.read_bytes())["calibrate"]
                sections = {"noise": {"clean": "corpus", "threshold": float(np.quantile(contrasts, 0.99))}}
            config = settings(folder, **sections)
            with ProgressBar(title) as progress:
                build_dataset(config, out, LocalExecutor(1), progress)
            results["removed"][title] = dropped(out, stage, folder / "in")
            print(title, results["removed"][title], flush=True)
            context = Context(config, out)
            if title in ("quality", "noise, clean text given", "sample"):
                model = "noise_models" if stage == "noise" else f"{stage}_model"
                results["mb_per_s"][stage] = rates(context, f"{stage}_scores", folder / "again")
                results["training_s"][stage] = training_s(context, model, folder / "again")
                print(
                    stage, results["mb_per_s"][stage]["median"], "MB/s,", results["training_s"][stage], "s", flush=True
                )
    write_result(f"data_scores_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
