"""Near-copies in a data build: planted ones that are found, distinct documents that are lost, copies by domain.

python -m benchmarks.data.data_copies [--documents 3000] [--copies 1000] [--megabytes 30]

Planted: documents of the installed text of which no two have a similarity of 0.5 or more, by a plain product of the
matrix of their runs of five words, and a copy of some of them in which 5 % of the words are others. A copy is found
where one of the two goes and the other stays; a document is lost where it goes and had no copy, or goes with its copy.
By domain: the default corpus, as it is read (`read.max_bytes` of 30 MB), searched at two thresholds.
"""

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.common import write_result
from benchmarks.data.data_stages import run_until
from benchmarks.data.data_texts import MB, installed_texts
from tilewright.data.engine.config import DataBuild
from tilewright.data.engine.tables import rows
from tilewright.data.stages.copies.exact import DROP, drops_of

CLAIM = "at a threshold of 0.5, copies with 5 % of the words changed are found and no distinct document is lost"
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.8)
CHANGED = 0.05
_WORD = re.compile(r"[a-z0-9_]+", re.IGNORECASE)
BASE_BYTES = 60 * MB
_LEAST_WORDS, _MOST_CHARS = 100, 30_000


def similarities(texts: list[str]) -> scipy.sparse.coo_array:
    """Jaccard similarity of all pairs of texts that share a run of five words, by a matrix product."""
    number: dict[tuple[str, ...], int] = {}
    columns: list[int] = []
    ends = [0]
    for text in texts:
        words = [word.lower() for word in _WORD.findall(text)]
        runs = {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}
        columns += [number.setdefault(run, len(number)) for run in runs]
        ends.append(len(columns))
    ones = np.ones(len(columns), np.int32)
    has = scipy.sparse.csr_array((ones, columns, ends), shape=(len(texts), len(number)))
    both = scipy.sparse.triu(has @ has.T, 1).tocoo()
    sizes = np.diff(ends)
    union = sizes[both.row] + sizes[both.col] - both.data
    return scipy.sparse.coo_array((both.data / union, (both.row, both.col)), shape=both.shape)


def distinct_texts(num: int) -> list[str]:
    """Installed texts of which no two resemble each other by 0.5 or more."""
    found = []
    for _, text in installed_texts(BASE_BYTES):
        if len(text) <= _MOST_CHARS and text.isascii() and len(_WORD.findall(text)) >= _LEAST_WORDS:
            found.append(text)
            if len(found) == 2 * num:
                break
    pairs = similarities(found)
    near: dict[int, list[int]] = {}
    for a, b, value in zip(pairs.row.tolist(), pairs.col.tolist(), pairs.data.tolist(), strict=True):
        if value >= 0.5:
            near.setdefault(b, []).append(a)
    stays: set[int] = set()
    for i in range(len(found)):
        if not stays.intersection(near.get(i, ())):
            stays.add(i)
    return [found[i] for i in sorted(stays)][:num]


def with_other_words(text: str, share: float, draw: random.Random, words: list[str]) -> str:
    """The text with a share of its words, at least one, replaced by others."""
    at = list(_WORD.finditer(text))
    parts, last = [], 0
    for i in sorted(draw.sample(range(len(at)), max(1, round(share * len(at))))):
        new = draw.choice(words)
        while new.lower() == at[i][0].lower():
            new = draw.choice(words)
        parts += [text[last : at[i].start()], new]
        last = at[i].end()
    return "".join([*parts, text[last:]])


def planted(num: int, copies: int, folder: Path) -> dict[str, Any]:
    """What each threshold finds and loses."""
    texts = distinct_texts(num)
    draw = random.Random(0)
    words = [match[0] for text in texts[:200] for match in _WORD.finditer(text)]
    changed = [with_other_words(text, CHANGED, draw, words) for text in texts[:copies]]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *changed]))
    exact = similarities([*texts[:copies], *changed])
    of_copy = exact.data[exact.col - exact.row == copies]
    quantiles = np.quantile(of_copy, (0.01, 0.5, 0.99))
    result: dict[str, Any] = {
        "documents": len(texts),
        "copies": copies,
        "similarity_of_copies": dict(zip(("1 %", "median", "99 %"), quantiles.tolist(), strict=True)),
        "thresholds": {},
    }
    for threshold in THRESHOLDS:
        read = {"source": str(source), "shard_bytes": 1 << 30}  # one shard, so that a record's number is its line's
        build = DataBuild.model_validate({"read": read, "duplicates": {"threshold": threshold}})
        context = run_until(build, folder / "out", 1, "near")
        drops = np.concatenate([np.zeros(0, DROP), drops_of([context.folder("exact"), context.folder("near")], 0)])
        gone = dict(zip(drops["doc"].tolist(), drops["stays"].tolist(), strict=True))
        found = sum((i in gone) != (len(texts) + i in gone) for i in range(copies))
        lost = sum(i in gone and (i >= copies or len(texts) + i in gone) for i in range(len(texts)))
        result["thresholds"][str(threshold)] = {"found": found / copies, "lost": lost / len(texts)}
        print(threshold, result["thresholds"][str(threshold)], flush=True)
    return result


def by_domain(megabytes: int, folder: Path) -> dict[str, Any]:
    """Documents and bytes of each domain of the installed text, and how many are copies."""
    table: dict[str, Any] = {}
    for threshold in (0.5, 0.8):
        settings = {"read": {"max_bytes": megabytes * MB}, "duplicates": {"threshold": threshold}}
        context = run_until(DataBuild.model_validate(settings), folder / "installed", 2, "unique")
        for shard, items in enumerate(context.listing.shards):
            row = table.setdefault(items[0].domain, {})
            kept = list(rows(context.folder("rules", shard) / "kept.parquet", ("bytes",)))
            if threshold == 0.5:
                _add(row, "all", len(kept), sum(one["bytes"] for one in kept))
            for reject in rows(context.folder("unique", shard) / "rejects.parquet", ("rule", "num_bytes")):
                if reject["rule"] == "near-copy":
                    _add(row, f"near at {threshold}", 1, reject["num_bytes"])
                elif threshold == 0.5:
                    _add(row, "exact", 1, reject["num_bytes"])
    total: dict[str, Any] = {}
    for row in table.values():
        for name, counts in row.items():
            _add(total, name, *counts)
    return table | {"total": total}


def _add(row: dict[str, list[int]], name: str, documents: int, num_bytes: int) -> None:
    old = row.get(name, [0, 0])
    row[name] = [old[0] + documents, old[1] + num_bytes]


def main() -> None:
    """Both parts, and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data-copies-") as name:
        found = planted(args.documents, args.copies, Path(name))
        domains = by_domain(args.megabytes, Path(name))
    print(json.dumps(domains, indent=1))
    write_result("data_copies", CLAIM, {"changed_words": CHANGED, "planted": found, "installed": domains})


if __name__ == "__main__":
    main()
