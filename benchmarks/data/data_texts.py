"""Texts for the benchmarks of data builds: what this installation carries, as shards of JSON lines, and variants of it.

Copy 0 of the text is the text. In copy k each word stands for another one of about its frequency, by a permutation that
k draws: two copies share hardly a run of five words, while the near-copies, lines and rare words inside of each copy
stay. So a corpus grows by copies with as many duplicates per byte as the text has.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_WORD = re.compile(r"[A-Za-z]{2,}")
_NEIGHBOURS = 16
"""Words that lie this close in frequency are exchanged among each other."""
MB = 10**6
BASE_BYTES = 200 * MB
"""Of the installed text that is used: files that a seed draws, shared over the domains."""


@lru_cache(maxsize=1)
def installed_texts(base_bytes: int = BASE_BYTES) -> tuple[tuple[str, str], ...]:
    """(domain, text) of the records of about `base_bytes` of the installed text, in an order that a seed draws."""
    from tilewright.data.common.records import Record
    from tilewright.data.engine.build_files import list_inputs
    from tilewright.data.engine.build_settings import DataBuild
    from tilewright.data.stages.read import read_item

    build = DataBuild.model_validate({"read": {"max_bytes": base_bytes}})
    found = []
    for shard in list_inputs(build.read).shards:
        for item in shard:
            found += [(one.domain, one.text) for one in read_item(item, build) if isinstance(one, Record)]
    random.Random(0).shuffle(found)
    return tuple(found)


def texts(num_bytes: int, base_bytes: int = BASE_BYTES) -> Iterator[tuple[str, str]]:
    """(domain, text) of at least `num_bytes` in all: the installed text, then copies in other words."""
    written, copy = 0, 0
    ranked = None
    while True:
        other: dict[str, str] = {}
        if copy:
            ranked = ranked or _ranked(base_bytes)
            other = _exchanged(ranked, copy)
        for domain, text in installed_texts(base_bytes):
            new = _WORD.sub(lambda m, words=other: words.get(m[0], m[0]), text) if copy else text
            yield domain, new
            written += len(new.encode())
            if written >= num_bytes:
                return
        copy += 1


def _ranked(base_bytes: int) -> list[str]:
    counts: Counter[str] = Counter()
    for _, text in installed_texts(base_bytes):
        counts.update(_WORD.findall(text))
    return [word for word, _ in counts.most_common()]


def _exchanged(ranked: list[str], seed: int) -> dict[str, str]:
    draw = random.Random(seed)
    found: dict[str, str] = {}
    for first in range(0, len(ranked), _NEIGHBOURS):
        group = ranked[first : first + _NEIGHBOURS]
        found |= dict(zip(group, draw.sample(group, len(group)), strict=True))
    return found


def write_shards(folder: Path, num_bytes: int, shard_bytes: int = 5 * MB, base_bytes: int = BASE_BYTES) -> int:
    """Write `num_bytes` of text as `folder`/NNNNN.jsonl, rows of id, text and domain; returns how many rows.

    Args:
        folder: made; its files are the same on each machine that has the same packages.
        num_bytes: of text, about; the files are a little larger.
        shard_bytes: of each file's text, about.
        base_bytes: of the installed text that copies are made of.
    """
    folder.mkdir(parents=True)
    rows, size, shard = 0, 0, 0
    file = (folder / f"{shard:05}.jsonl").open("w", encoding="utf-8")
    for domain, text in texts(num_bytes, base_bytes):
        if size >= shard_bytes:
            file.close()
            size, shard = 0, shard + 1
            file = (folder / f"{shard:05}.jsonl").open("w", encoding="utf-8")
        file.write(json.dumps({"id": f"{rows:08}", "text": text, "domain": domain}, ensure_ascii=False) + "\n")
        size += len(text.encode())
        rows += 1
    file.close()
    return rows
