"""A built dataset at an address, or several: all of it but the training tokens is brought here, as one cache entry.

Of several datasets each is one domain, of the name that it is given; they have one tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import DataError
from tilewright.core.log import get_logger
from tilewright.data.batches.build_rows import INDEX as INDEX_HERE
from tilewright.data.common.progress import ProgressBar
from tilewright.data.dataset.open_built import DATASET, FORMAT
from tilewright.data.dataset.remote.address import DamagedFileError, Remote, SourceAwayError
from tilewright.data.dataset.remote.shard_index import INDEX, ShardIndex, TokenShard, by_domain
from tilewright.data.engine.unit_folders import fingerprint_of

log = get_logger(__name__)

_LEFT = ("tokens/train.npy", "tokens/train.trained.npy")


@dataclass(frozen=True)
class RemoteDataset:
    """A built dataset at an address."""

    name: str
    """Of its domain, where it is one of several; else empty."""
    remote: Remote
    content: Mapping[str, Any]
    """Of `dataset.json`."""
    index: ShardIndex
    away: str = ""
    """Why the address cannot be read: the rest is as it was last found there."""

    @property
    def shards(self) -> tuple[TokenShard, ...]:
        """The shards of a remote dataset, with its own name as their domain where it has one."""
        return tuple(replace(one, domain=self.name or one.domain) for one in self.index.shards)


def find_dataset(name: str, remote: Remote, known: Path | None = None) -> RemoteDataset:
    """Find the remote dataset at an address.

    Args:
        name: of its domain, where it is one of several.
        remote: the address.
        known: folder that keeps what addresses had, for when one cannot be read; None: what cannot be read is an error.

    Raises:
        DataError: there is none, or one without shards, or it cannot be reached and was never found before.
    """
    kept = None if known is None else known / f"{fingerprint_of([remote.address])}.json"
    # Only an address that does not answer falls back to what it had before; a wrong answer is an error.
    try:
        content = json.loads(remote.fetch(DATASET))
        if content.get("format") != FORMAT:
            raise _refused(remote, "Dataset of another version of tilewright", f"format {content.get('format')}")
        if not content.get("shards"):
            raise _refused(remote, "Built dataset has no token shards", f"no shards in {DATASET}")
        found = RemoteDataset(
            name, remote, content, ShardIndex.of(remote.fetch(INDEX, *content["shards"]), remote.address)
        )
    except DamagedFileError as error:
        raise _refused(remote, "No built dataset at this address", f"{DATASET}: {error}") from error
    except SourceAwayError as error:
        if kept is not None and (found := _recalled(name, remote, kept, str(error))) is not None:
            return found
        raise DataError(
            "Address of a dataset cannot be read",
            got=str(error),
            need="an address that answers, and the right to read it",
            try_="the same command again, or data.streaming.retries = a larger number",
            where=remote.address,
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise _refused(remote, "No built dataset at this address", f"{DATASET}: {error}") from error
    # For the next run, if the address does not answer then.
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps({DATASET: content, INDEX: json.loads(found.index.to_json())}, ensure_ascii=False))
    return found


def _recalled(name: str, remote: Remote, kept: Path, why: str) -> RemoteDataset | None:
    """The recalled content of a remote dataset's address when it was last read; None where that is not known."""
    try:
        both = json.loads(kept.read_bytes())
        index = ShardIndex.of(json.dumps(both[INDEX]).encode(), str(kept))
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or one that was cut short
        return None
    log.warning(
        "%s cannot be read (%s): its dataset is taken to be the one that was last found there", remote.address, why
    )
    return RemoteDataset(name, remote, both[DATASET], index, why)


def fingerprint(datasets: Sequence[RemoteDataset]) -> str:
    """The fingerprint of remote datasets: names the content of all."""
    return fingerprint_of([[one.name, one.content["fingerprint"], list(one.content["shards"])] for one in datasets])


def check_alike(datasets: Sequence[RemoteDataset]) -> None:
    """Check that remote datasets are alike: raise where they cannot be one.

    Raises:
        DataError: with what differs.
    """
    first = datasets[0]
    for one in datasets[1:]:
        if _tokenizer(one) != _tokenizer(first) or one.index.dtype != first.index.dtype:
            raise DataError(
                "Datasets were encoded with different tokenizers",
                got=f"{first.remote.address} and {one.remote.address}",
                need="one tokenizer for all: ids of another one mean other words",
                try_='path = "FOLDER" in [tokenizer] of each data.toml, and `tilewright data build` again',
                where="data.sources",
            )


def _tokenizer(dataset: RemoteDataset) -> list[Any]:
    files = dataset.content["files"]
    return sorted([name, *entry] for name, entry in files.items() if name.startswith("tokens/tokenizer/"))


def bring(folder: Path, datasets: Sequence[RemoteDataset], *, progress: ProgressBar) -> None:
    """Bring a remote dataset: fill `folder` with what training reads besides the shards. Documents are in the order of
    the shards.

    Raises:
        DataError: a file is missing or damaged, or an address cannot be read.
    """
    progress.phase("reading the dataset's address")
    tables, parts = [], []
    for number, one in enumerate(datasets):
        part = folder / f"part{number}" if len(datasets) > 1 else folder
        parts.append(part)
        for name, (size, digest) in one.content["files"].items():
            if name.startswith("tokens/") and name not in _LEFT:
                path = part / name.removeprefix("tokens/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_fetched(one.remote, name, size, digest))
        table = pq.read_table(part / "documents.parquet")
        if one.name:
            names = pa.array([one.name] * len(table), table.schema.field("domain").type)
            table = table.set_column(table.schema.get_field_index("domain"), table.schema.field("domain"), names)
        tables.append(table)
    if len(datasets) > 1:
        _join(datasets, parts, folder)
    every = pa.concat_tables(tables)
    trained = pc.equal(every["split"], "train")  # pyright: ignore[reportAttributeAccessIssue]  # made at import
    held_out = pc.equal(every["split"], "holdout")  # pyright: ignore[reportAttributeAccessIssue]
    train = every.filter(trained)
    train = train.take(pa.array(by_domain(train["domain"].to_pylist())))
    pq.write_table(pa.concat_tables([train, every.filter(held_out)]), folder / "documents.parquet")
    (folder / INDEX_HERE).write_text(joined_index(datasets).to_json(), encoding="utf-8")


def joined_index(datasets: Sequence[RemoteDataset]) -> ShardIndex:
    """One index of the shards of several remote datasets, those of a domain behind each other, the domains by name."""
    shards = sorted((shard for one in datasets for shard in one.shards), key=lambda shard: shard.domain)
    return ShardIndex(datasets[0].index.dtype, any(one.index.marked for one in datasets), tuple(shards))


def _fetched(remote: Remote, name: str, size: int, digest: str) -> bytes:
    try:
        return remote.fetch(name, size, digest)
    except (DamagedFileError, SourceAwayError) as error:
        raise DataError(
            "File of a dataset cannot be read from its address",
            got=str(error),
            need=f"{size} bytes, as the build wrote them",
            try_="upload the folder of the build again, or run the same command later",
            where=f"{remote.address}/{name}",
        ) from error


def _join(datasets: Sequence[RemoteDataset], parts: Sequence[Path], folder: Path) -> None:
    """Join remote datasets: held-out streams behind each other, one tokenizer, sums of what summaries count."""
    (parts[0] / "tokenizer").rename(folder / "tokenizer")
    for name in ("holdout.npy", "holdout.bytes.npy", "holdout.trained.npy"):
        found = [np.load(part / name, allow_pickle=False) for part in parts if (part / name).exists()]
        if found and len(found) != len(parts):
            raise DataError(
                "Datasets with windows of context and without cannot be mixed",
                got=", ".join(one.remote.address for one in datasets),
                need="overlap_loss of all, or of none",
                try_="the same [chunk] in each data.toml",
                where="data.sources",
            )
        if found:
            np.save(folder / name, np.concatenate(found))
    (folder / "rejects.jsonl").write_bytes(b"".join((part / "rejects.jsonl").read_bytes() for part in parts))
    summaries = {one.name: one.content["summary"] for one in datasets}
    (folder / "summary.json").write_text(json.dumps(_summed(summaries), indent=1, ensure_ascii=False), encoding="utf-8")
    for part in parts:
        for path in sorted(part.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        part.rmdir()


def _summed(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    names = ("available_bytes", "docs", "bytes", "tokens", "media", "duplicates", "near_duplicates")
    every = list(summaries.values())
    totals: dict[str, Any] = {name: sum(one[name] for one in every) for name in names}
    of_domain = ("docs", "bytes", "tokens", "holdout_docs", "holdout_tokens")
    return {
        **every[0],
        **totals,
        "source": ", ".join(one["source"] for one in every),
        "bytes_per_token": round(totals["bytes"] / max(1, totals["tokens"]), 3),
        "read": {
            kind: {name: sum(one["read"][kind][name] for one in every) for name in entry}
            for kind, entry in every[0]["read"].items()
        },
        "refused": {f"{name}: {why}": row for name, one in summaries.items() for why, row in one["refused"].items()},
        "file_types_not_read": {},
        "notes": [f"{name}: {note}" for name, one in summaries.items() for note in one.get("notes", ())],
        "domains": {
            name: {key: sum(domain[key] for domain in one["domains"].values()) for key in of_domain}
            for name, one in summaries.items()
        },
        "records": {f"{name}/{of}": row for name, one in summaries.items() for of, row in one["records"].items()},
    }


def _refused(remote: Remote, what: str, got: str) -> DataError:
    return DataError(
        what,
        got=got,
        need="the folder that `tilewright data build` of this version has filled, with its shards",
        try_="tilewright data build data.toml --out FOLDER, and upload the folder to the address",
        where=remote.address,
    )
