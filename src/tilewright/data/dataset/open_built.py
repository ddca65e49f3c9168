"""A built dataset's folder, found and read: by training, which takes its tokens, and by `tilewright data inspect`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import DataError
from tilewright.data.chat.load import TEMPLATE_FILE
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.engine.build_files import INSTALLED
from tilewright.data.engine.record_tables import rows

DATASET = "dataset.json"
"""The file that makes a folder a built dataset: written last, removed first."""
FORMAT = 3


def built_at(source: str) -> Path | None:
    """The folder of a dataset that `tilewright data build` finished, or None where a source is something else."""
    folder = Path(source).expanduser()
    is_built = source != INSTALLED and os.path.isfile(folder / DATASET)  # False, too, for what no file can be called
    return folder if is_built else None


def built_vocabulary(folder: Path, *, images: bool) -> int:
    """Ids that a model of a built dataset tells apart: of its tokenizer, or the classes of its images.

    Raises:
        DataError: there is no finished dataset.
    """
    summary = read_dataset(folder)["summary"]
    return len(summary["tensors"].get("pixels", {}).get("domains", [])) or 1 if images else summary["vocab_size"]


def read_dataset(folder: Path) -> dict[str, Any]:
    """Open `dataset.json` of a built dataset: fingerprint, summary, settings and hashes of the stages.

    Raises:
        DataError: there is no finished dataset, or one of another version.
    """
    unfinished, absent = (folder / "work").is_dir(), f"no {DATASET}" if folder.is_dir() else "no such folder"
    try:
        content = json.loads((folder / DATASET).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            "Build of this dataset is not finished" if unfinished else "No built dataset at this path",
            where=str(folder),
            got=absent if isinstance(error, FileNotFoundError | NotADirectoryError) else str(error),
            need="the folder of a finished `tilewright data build`",
            try_="tilewright data build data.toml --out " + str(folder),
        ) from None
    if content.get("format") != FORMAT:
        raise DataError(
            "Dataset of another version of tilewright",
            where=str(folder / DATASET),
            got=f"format {content.get('format')}",
            need=f"format {FORMAT}",
            try_="tilewright data build data.toml --out " + str(folder),
        )
    return content


def find_records(folder: Path, kind: str, wanted: str) -> Iterator[dict[str, Any]]:
    """Find records of a built dataset: rows of `records` or `rejects` (`kind`) that `matches` finds."""
    for file in sorted((folder / kind).glob("*.parquet")):
        yield from (row for row in rows(file) if matches(row, wanted))


def matches(row: Mapping[str, Any], wanted: str) -> bool:
    """True if a record of a built dataset matches `wanted`: the beginning of its id, the name of its file, the end of
    its path, or the stage or rule that dropped it. Names may be globs: * stands for anything.

    Example:
        >>> row = {"id": "0a1b", "path": "notes/torn.png", "stage": "read", "rule": "damaged image"}
        >>> [matches(row, text) for text in ("0a", "torn.png", "notes/torn.png", "damaged*", "read")]
        [True, True, True, True, True]
        >>> [matches(row, text) for text in ("torn", "image", "orn.png")]
        [False, False, False]
    """
    path = row["path"]
    if (row["id"] and row["id"].startswith(wanted)) or path == wanted or path.endswith("/" + wanted):
        return True
    if fnmatchcase(path, wanted) or fnmatchcase(path, "*/" + wanted):
        return True
    names = row.get("stage"), row.get("rule")
    return any(name is not None and (name == wanted or fnmatchcase(name, wanted)) for name in names)


@dataclass(frozen=True)
class BuiltTokens:
    """The part of a built dataset that training reads: the folder of its token streams, and what names their
    content."""

    tokens: Path
    fingerprint: str


def built_tokens(
    folder: Path, format: str, tokenizer: str, domains: tuple[str, ...], template: str | None = None
) -> BuiltTokens:
    """The tokens of a built dataset, checked against what a run wants of it.

    Args:
        folder: of the dataset.
        format: of the rows that are wanted.
        tokenizer: of loaded weights, or the one that is asked for; "" where none is.
        domains: those that are wanted.
        template: text of the chat template that is wanted; None: the dataset's.

    Raises:
        DataError: the dataset is damaged, or is not what the run wants.
    """
    content = read_dataset(folder)
    _check_format(format, built_format(content))
    for name, (size, digest) in content["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or hash_file(path) != digest:
            raise DataError(
                "Built dataset is damaged",
                where=str(path),
                got="a file that is missing" if not path.is_file() else "a file that has changed",
                need=f"{size} bytes, as the build wrote them",
                try_="the same `tilewright data build` again, which makes only what is missing",
            )
    tokens = folder / "tokens"
    trained_on = content["settings"]["tokenizer"]["path"] or "a trained one"
    check_tokenizer(tokenizer, tokens, f"{trained_on} for {folder}")
    if template is not None:
        _check_template(template, tokens / "tokenizer" / TEMPLATE_FILE)
    if not content["summary"]["tokens"]:
        need, try_ = "records with a text", 'model.task = "image_classification" for its images'
        if format != "text":
            need = "conversations that the template renders"
            try_ = f"tilewright data inspect {folder}   (what was refused)"
        raise DataError("Built dataset holds no text", where=str(folder), got="0 tokens", need=need, try_=try_)
    check_domains(domains, list(content["summary"]["domains"]))
    return BuiltTokens(tokens, content["fingerprint"])


def built_format(content: Mapping[str, Any]) -> str:
    """The `data.format` that a built dataset is of, by what `read_dataset` gives."""
    return content["settings"].get("chat", {}).get("format", "text")


def _check_format(wanted: str, built: str) -> None:
    if wanted != built:
        raise DataError(
            "Built dataset holds rows of another format",
            where="data.format",
            got=f"{built}; the run wants {wanted}",
            need=f'data.format = "{built}", or a build with format = "{wanted}" in [chat] of data.toml',
            try_=f'data.format = "{built}"',
        )


def _check_template(wanted: str, file: Path) -> None:
    if wanted.splitlines() != file.read_text(encoding="utf-8").splitlines():
        raise DataError(
            "Built dataset was rendered with another chat template",
            where="data.chat_template",
            got=f"another text than {file}",
            need="one and the same: answers are trained as it writes them",
            try_=f"data.chat_template = {file}",
        )


def check_tokenizer(tokenizer: str, tokens: Path, of: str) -> None:
    """Check before a built dataset is used: raise where it was encoded with another tokenizer than a run has.

    Args:
        tokenizer: of loaded weights, or the one that is asked for; "" where none is.
        tokens: folder of the dataset's tokenizer.
        of: the dataset's tokenizer, for the error.

    Raises:
        DataError: so it is.
    """
    if tokenizer and not _same_tokenizer(Path(tokenizer).expanduser(), tokens / "tokenizer"):
        raise DataError(
            "Built dataset was encoded with another tokenizer",
            where="data.tokenizer",
            got=f"{tokenizer} for the run, {of}",
            need="one and the same: ids of another tokenizer mean other words",
            try_=f'path = "{tokenizer}" in [tokenizer] of data.toml, and `tilewright data build` again',
        )


def check_domains(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Check before a built dataset is used: raise where a domain is wanted that it has not.

    Raises:
        DataError: with those that it has.
    """
    if unknown := sorted(set(wanted) - set(known)):
        need, try_ = f"some of: {', '.join(known)}", "data.domains = []   (all of them)"
        raise DataError("Unknown data domain", where="data.domains", got=", ".join(unknown), need=need, try_=try_)


def _same_tokenizer(wanted: Path, built: Path) -> bool:
    """True if a built dataset's tokenizer and a run's give the same ids."""
    return load_tokenizer(wanted).backend.to_str() == load_tokenizer(built).backend.to_str()
