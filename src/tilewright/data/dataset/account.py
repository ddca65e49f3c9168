"""The account of files, documents and bytes: found = used + refused, in each of them.

Two ledgers. Files are counted once, with their bytes on disk: a file is used where a document of it is. A file that is
read in parts shares its bytes out over them, so that a limit that leaves half of a file unread shows in the bytes.
Documents are what came out of the parts that were read, with their bytes of text: pieces of a long text, rows, and
lines that were refused.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.units import format_bytes
from tilewright.data.common.records import NOTHING, TOO_SMALL, Rejected, rejected
from tilewright.data.sources.source_parts import Part, Source, printable

_MOST_ROWS = 1000  # of one reason in the list of rejects; the rest are one row
_MOST_REASONS = 25  # in a summary, and as many types; the rest are one
_NUM_EXAMPLES = 3
_OTHERS = "others"
_TYPE = re.compile(r"file type (.+) is not read")
TYPES = "file type is not read"
"""All reasons of that kind as one; the types are listed separately."""


@dataclass
class PartRecord:
    """A part of the source and what became of it. `reason` is the first one for which something in it was refused."""

    domain: str
    file: str
    size: int
    documents: int = 0
    text_bytes: int = 0
    opened: bool = False
    reason: str = ""


class Account:
    """Both ledgers of one reading. `rejects` of the source are those found without reading text."""

    def __init__(self, source: Source):
        self.records = {id(p): PartRecord(p.domain, p.file or p.name, p.size) for p in source.parts}
        self._files = dict(source.files)
        self._file_reason: dict[str, str] = {}
        self._rejects: dict[tuple[str, str], list] = {}
        self._documents: dict[str, list[int]] = {}  # reason: documents, bytes
        self.notes: dict[str, int] = {}
        for reject in source.rejects:
            self.refuse_file(reject)
        found: dict[str, int] = {}
        for record in self.records.values():
            found[record.file] = found.get(record.file, 0) + record.size
        self._files = found | self._files

    def refuse_file(self, reject: Rejected) -> None:
        """List a file that is refused as a whole; no document of it is counted."""
        self._file_reason.setdefault(_shown(reject.path), _shown(reject.rule))
        self._files.setdefault(reject.path, reject.num_bytes)
        self._list(reject)

    def open(self, part: Part) -> PartRecord:
        """Note in the account that a part of the source is being read; returns the part's record."""
        record = self.records[id(part)]
        record.opened = True
        return record

    def refuse(self, record: PartRecord, reject: Rejected) -> None:
        """Count a row, line or document that is refused, and list it."""
        self.count(record, reject.rule, reject.count, reject.num_bytes)
        self._list(reject)

    def count(self, record: PartRecord, reason: str, documents: int, num_bytes: int) -> None:
        """Count refused documents without listing where."""
        reason = _shown(reason)
        record.reason = record.reason or reason
        entry = self._documents.setdefault(reason, [0, 0])
        entry[0] += documents
        entry[1] += num_bytes

    def take_back(self, record: PartRecord, reject: Rejected) -> None:
        """Refuse a document that was counted as used."""
        record.documents -= 1
        record.text_bytes -= reject.num_bytes
        self.refuse(record, reject)

    def drop(self, domains: Collection[str]) -> None:
        """Take back what was used of `domains`, which are too small to hold a part out of."""
        for record in self.records.values():
            if record.domain in domains and record.documents:
                self.count(record, TOO_SMALL, record.documents, record.text_bytes)
                record.documents, record.text_bytes = 0, 0
        for domain in domains:
            self._list(rejected(domain, TOO_SMALL))

    def use_files(self, files: Collection[str]) -> None:
        """Count files as used that have no parts."""
        for file in files:
            self.add_part(PartRecord("", file, self._files[file], 1, 0, True))

    def add_part(self, record: PartRecord) -> PartRecord:
        """Add a part to the account that the source does not list, of one of its `files`."""
        self.records[-1 - len(self.records)] = record
        return record

    def note(self, text: str) -> None:
        """Count a change to a document that is used."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def add(self, reject: Rejected) -> None:
        """List something that has no document to count."""
        self._list(reject)

    def _list(self, reject: Rejected) -> None:
        key = _shown(reject.path), _shown(reject.rule)
        entry = self._rejects.setdefault(key, [0, _shown(str(reject.value)), 0])
        entry[0] += reject.count
        entry[2] += reject.num_bytes

    def rows(self) -> list[Rejected]:
        """Rejects summed by place and reason, so that a million bad rows stay one line with a count."""
        kept: list[Rejected] = []
        by_reason: dict[str, int] = {}
        others: dict[str, list[int]] = {}
        for (where, reason), (count, example, num_bytes) in self._rejects.items():
            by_reason[reason] = by_reason.get(reason, 0) + 1
            if by_reason[reason] <= _MOST_ROWS:
                kept.append(rejected(where, reason, example, count=count, num_bytes=num_bytes))
            else:
                entry = others.setdefault(reason, [0, 0])
                entry[0] += count
                entry[1] += num_bytes
        return kept + [rejected(_OTHERS, r, count=count, num_bytes=size) for r, (count, size) in others.items()]

    def summary(self) -> dict[str, Any]:
        """Plain JSON: `read` has what was found, used and refused, `refused` the last by reason, `file_types_not_read`
        one of the reasons by file type, and `changed` how many used documents are not as they were found."""
        reasons: dict[str, dict[str, Any]] = {}

        def entry(reason: str) -> dict[str, Any]:
            empty = {"files": 0, "file_bytes": 0, "documents": 0, "text_bytes": 0, "examples": []}
            return reasons.setdefault(reason, empty)

        types: dict[str, dict[str, Any]] = {}
        # 1. Files. One without a used document is refused whole, for the first reason; its type is counted apart.
        used_files, used_bytes = 0, 0
        for file, size, records in self._by_file():
            whole = _reason_of(records, self._file_reason.get(_shown(file), NOTHING))
            used_files += not whole
            if kind := file_type(whole):
                whole = TYPES
                of_type = types.setdefault(kind, {"files": 0, "file_bytes": 0})
                of_type["files"] += 1
                of_type["file_bytes"] += size
            if whole:
                entry(whole)["files"] += 1
            # Bytes of a file that is read in parts are shared over them; a part that gave nothing is refused with its
            # reason.
            for record, share in _shares(size, records):
                if (record is not None and record.documents) or not (whole or _part_reason(record)):
                    used_bytes += share
                else:
                    entry(_part_reason(record) or whole)["file_bytes"] += share
            if whole and len(entry(whole)["examples"]) < _NUM_EXAMPLES:
                entry(whole)["examples"].append(_shown(file))
        # 2. Documents and text, which were counted by reason while they were read.
        for reason, (documents, num_bytes) in self._documents.items():
            entry(reason)["documents"] += documents
            entry(reason)["text_bytes"] += num_bytes
        # 3. Examples, also of reasons for which only rows or documents were refused.
        for where, reason in self._rejects:
            examples = reasons[reason]["examples"] if reason in reasons else [where]
            if len(examples) < _NUM_EXAMPLES and where not in examples:
                examples.append(where)
        used = {
            "files": used_files,
            "file_bytes": used_bytes,
            "documents": sum(r.documents for r in self.records.values()),
            "text_bytes": sum(r.text_bytes for r in self.records.values()),
        }
        # 4. Found = used + refused, in each column.
        refused = {name: sum(reason[name] for reason in reasons.values()) for name in used}
        return {
            "read": {
                name: {"found": used[name] + refused[name], "used": used[name], "refused": refused[name]}
                for name in used
            },
            "refused": most_bytes(reasons, "reasons"),
            "file_types_not_read": most_bytes(types, "types"),
            "changed": self.notes,
        }

    def _by_file(self) -> list[tuple[str, int, list[PartRecord]]]:
        parts: dict[str, list[PartRecord]] = {file: [] for file in self._files}
        for record in self.records.values():
            parts[record.file].append(record)
        return [(file, self._files[file], records) for file, records in parts.items()]


def listed(reject: Rejected) -> dict[str, Any]:
    """A reject as a line of `rejects.jsonl`."""
    found = {"where": reject.path, "reason": reject.rule, "count": reject.count, "example": reject.value}
    return found | {"num_bytes": reject.num_bytes}


def file_type(reason: str) -> str:
    """The type of file that a reason names, or "".

    Example:
        >>> file_type("file type .so is not read"), file_type("empty file")
        ('.so', '')
    """
    found = _TYPE.fullmatch(reason)
    return found[1] if found else ""


def account_of_files(sizes: Mapping[str, int], used: Collection[str], rejects: Sequence[Rejected]) -> dict[str, Any]:
    """The result of `Account.summary`, of files alone that are used or refused as a whole.

    Args:
        sizes: bytes of each file that was found.
        used: those of them that are used.
        rejects: of the others, one each.
    """
    account = Account(Source("", "", (), tuple(rejects), sizes))
    account.use_files(used)
    summary = account.summary()
    for name in ("documents", "text_bytes"):
        del summary["read"][name]
        for entry in summary["refused"].values():
            del entry[name]
    return summary


def _reason_of(records: list[PartRecord], otherwise: str) -> str:
    """Why nothing of a file is used, "" where something is."""
    if any(record.documents for record in records):
        return ""
    return next((record.reason for record in records if record.reason), otherwise)


def _part_reason(record: PartRecord | None) -> str:
    return record.reason if record is not None and not record.documents else ""


def _shares(size: int, records: list[PartRecord]) -> list[tuple[PartRecord | None, int]]:
    """`size` bytes over parts in proportion to their sizes, in whole bytes that add up to it."""
    total = sum(record.size for record in records)
    if not total:
        return [(records[0] if records else None, size)]
    shares, before = [], 0
    for record in records:
        after = before + record.size
        shares.append((record, size * after // total - size * before // total))
        before = after
    return shares


def most_bytes(entries: dict[str, dict[str, Any]], noun: str) -> dict[str, dict[str, Any]]:
    """The entries by how many bytes they count, the rare ones as one; lists of examples as text.

    Args:
        entries: by name, each with `file_bytes`, perhaps `text_bytes`, other counts, and `examples`.
        noun: of the names.
    """
    order = sorted(entries, key=lambda e: (-entries[e]["file_bytes"], -entries[e].get("text_bytes", 0), e))
    kept, rest = order[:_MOST_REASONS], order[_MOST_REASONS:]
    found = {e: dict(entries[e]) for e in kept}
    if rest:
        one = found[f"{len(rest)} other {noun}"] = dict(entries[rest[0]])
        for name in one:
            values = [entries[e][name] for e in rest]
            one[name] = rest[:_NUM_EXAMPLES] if name == "examples" else sum(values)
    for entry in found.values():
        if "examples" in entry:
            entry["examples"] = ", ".join(entry["examples"])
    return found


def _shown(text: str, longest: int = 200) -> str:
    text = text if len(text) <= 4 * longest else text[: 4 * longest]
    shown = text if text.isprintable() else "".join(c if c.isprintable() else printable(c) for c in text)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def account_line(summary: dict[str, Any], most: int = 5) -> str:
    """One line of what was found, used and refused; the `most` largest reasons by name.

    Args:
        summary: of prepared data, with what `Account.summary` gives.
        most: reasons that are named; the types of files that are not read are one.
    """
    read, refused = summary["read"], summary["refused"]
    line = f"{_counted(read['files']['found'], 'file')}, {format_bytes(read['file_bytes']['found'])} found | "
    line += f"{read['files']['used']:,} used, {format_bytes(read['file_bytes']['used'])}"
    if "documents" in read:
        text = read["documents"]
        line += f": {text['used']:,} of {_counted(text['found'], 'document')}, "
        line += f"{format_bytes(read['text_bytes']['used'])} of text"
    if not refused:
        return line + " | nothing refused"
    types = list(summary["file_types_not_read"])
    kinds = {TYPES: f"{TYPES}: {', '.join(types[:4])}{', ...' if len(types) > 4 else ''}"}
    named = [f"{kinds.get(reason, reason)} ({_amount(entry)})" for reason, entry in list(refused.items())[:most]]
    if len(refused) > most:
        named.append(_counted(len(refused) - most, "other reason"))
    return f"{line} | refused: {'; '.join(named)}"


def _amount(entry: dict[str, Any]) -> str:
    parts = [_counted(entry[noun + "s"], noun) for noun in ("file", "document") if entry.get(noun + "s")]
    size = entry.get("file_bytes") or entry.get("text_bytes")
    return ", ".join([*parts, format_bytes(size)] if size else parts)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
