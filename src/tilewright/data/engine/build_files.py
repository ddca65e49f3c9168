"""The inputs of a build: the files below its sources, shared out over shards, without reading any text.

A shard holds files of one domain, or ranges of large ones. Which files are in which shard depends on the listing alone,
so that any number of processes makes the same dataset.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from tilewright.core.errors import DataError, is_of_machine, machine_error
from tilewright.data.common.records import EMPTY, LIMIT, NO_DOMAIN, Rejected
from tilewright.data.engine.build_settings import ReadSection
from tilewright.data.readers.file_kinds import HEAD_BYTES, kind_of, media_suffixes
from tilewright.data.readers.media.captions import TABLES, caption_files, described_file
from tilewright.data.readers.read_file import LINES
from tilewright.data.readers.text.decode_text import wide_encoding_of
from tilewright.data.sources.content_hash import Contents
from tilewright.data.sources.find_files import find_files, stat_key
from tilewright.data.sources.hub import PREFIX, hub_dataset
from tilewright.data.sources.installed_text import installed_source
from tilewright.data.sources.parquet_and_arrow import is_saved_dataset
from tilewright.data.sources.path_purpose import BUILD, existing
from tilewright.data.sources.source_parts import Part, Source, printable

INSTALLED = "installed"
_LONGEST_CAPTIONS = 1 << 60
"""All files of captions count: how long one may be is a setting of the stage that reads them."""


@dataclass(frozen=True)
class Item:
    """A file, or the bytes [start, stop) of a large one. `key` says which content the file has; `path` is "" for a part
    of the installed text, which its domain and name identify."""

    domain: str
    name: str
    path: str
    size: int
    key: str
    start: int = 0
    stop: int = 0
    part: Part | None = field(default=None, compare=False, repr=False)
    """How a part of the installed text is read."""
    stat: str = field(default="", compare=False)
    """`stat_key` of the file when it was listed."""

    def identity(self) -> dict[str, Any]:
        """The identity of a build's file by its content; not its place on this machine."""
        return {name: getattr(self, name) for name in ("domain", "name", "size", "key", "start", "stop")}


@dataclass
class Listing:
    """Shards of items in the order of the dataset, what was refused while looking, and what the limit left out."""

    shards: list[list[Item]] = field(default_factory=list)
    rejects: list[Rejected] = field(default_factory=list)
    found_bytes: int = 0
    left: list[tuple[str, int, str]] = field(default_factory=list)
    """Name and bytes of files, or of ranges of them, that are left out, and why."""

    def keys(self, shard: int) -> list[dict[str, Any]]:
        """Keys that identify the content of a shard of the build's files."""
        return [item.identity() for item in self.shards[shard]]

    def domains(self) -> list[str]:
        """The domain of each shard of the build's files."""
        return [shard[0].domain for shard in self.shards]

    def facts(self) -> list[Any]:
        """Facts of a build's files: all that the account of a build takes from a listing."""
        files = [[item.domain, item.name, item.size] for shard in self.shards for item in shard]
        rejects = [[r.path, r.rule, str(r.value), r.domain, r.count, r.num_bytes] for r in self.rejects]
        return [files, rejects, self.found_bytes, self.left]


def list_inputs(read: ReadSection, installed: Source | None = None, contents: Contents | None = None) -> Listing:
    """List a build's files: find them, and which content each has.

    Args:
        read: settings.
        installed: the installed text, where it has been listed already: that takes a second.
        contents: of files that were read before.

    Raises:
        DataError: a source that does not exist, an unknown domain, or nothing to read.
    """
    listing = Listing()
    items = list(_items(read, listing, installed, contents or Contents()))
    listing.found_bytes = sum(item.size for item in items) + sum(reject.num_bytes for reject in listing.rejects)
    # 1. A wrong name beside right ones is an error; with no domain at all the reason is below, in `_nothing`.
    domains = sorted({item.domain for item in items})
    unknown = sorted(set(read.domains) - set(domains))
    if unknown and domains:
        raise DataError(
            "Unknown data domain",
            where="read.domains",
            got=", ".join(unknown),
            need="some of: " + ", ".join(domains),
            try_="domains = []   (all of them)",
        )
    # 2. The limit takes whole items, by a seeded draw; what it leaves is listed with its reason.
    wanted = {name: [i for i in items if i.domain == name] for name in read.domains or domains}
    chosen = _within(wanted, read) if read.max_bytes else wanted
    taken = [item for name in chosen for item in chosen[name]]
    kept = {(item.domain, item.name, item.start) for item in taken}
    listing.left = [
        (item.name, item.size, LIMIT if item.domain in wanted else NO_DOMAIN)
        for item in items
        if (item.domain, item.name, item.start) not in kept
    ]
    # 3. Shards are of one domain, in the order of names: a unit depends on its own files only.
    for name in sorted(chosen):
        listing.shards += _shards(chosen[name], read.shard_bytes)
    if not listing.shards:
        raise _nothing(read, listing)
    return listing


def _items(read: ReadSection, listing: Listing, installed: Source | None, contents: Contents) -> Iterator[Item]:
    if read.sources:
        for domain, path in read.sources.items():
            if path == INSTALLED:
                yield from _installed(installed, listing, domain)
            else:
                yield from _files(path, domain, read, listing, contents, f"{domain}/")
    elif read.source == INSTALLED:
        yield from _installed(installed, listing)
    else:
        yield from _files(read.source, "", read, listing, contents, "")


def _installed(source: Source | None, listing: Listing, domain: str = "") -> Iterator[Item]:
    source = source or installed_source()
    listing.rejects += [_refused(reject, domain) for reject in source.rejects]
    for part in source.parts:
        yield Item(domain or part.domain, part.name, "", part.size, source.key, part=part)


def _files(
    source: str, domain: str, read: ReadSection, listing: Listing, contents: Contents, prefix: str
) -> Iterator[Item]:
    source = hub_dataset(source) if source.startswith(PREFIX) else source
    # 1. The source, and its images and sounds: a text with the name of one describes it.
    want = BUILD.named(f"read.sources.{domain}") if domain else BUILD
    root = existing(Path(source).expanduser(), source, want)
    saved = root.is_dir() and is_saved_dataset(root)
    found = find_files(root)
    stems = {os.path.splitext(name) for name in found.sizes}
    media = {stem for stem, suffix in stems if suffix.lower() in media_suffixes()} if root.is_dir() else None
    for reject in found.rejects:
        folder, _, rest = printable(reject.path).partition("/")
        listing.rejects.append(_refused(reject, domain or (folder if rest else ""), prefix))
    # 2. Each file is an item, or several ranges of one, or a reject; no text is read.
    for name, path, status in found.files:
        where = domain or (name.split("/")[0] if "/" in name else "text")
        if not stat.S_ISREG(status.st_mode):
            listing.rejects.append(Rejected(prefix + name, "", "list", "not a regular file", "", "", domain=where))
        elif saved and path.suffix != ".arrow":
            rule = "file of a saved dataset that holds no rows to read"
            listing.rejects.append(Rejected(prefix + name, "", "list", rule, path.suffix, ".arrow", domain=where))
        elif not status.st_size:
            listing.rejects.append(Rejected(prefix + name, "", "list", EMPTY, 0.0, 1.0, domain=where))
        else:
            size, seen = status.st_size, stat_key(status)
            try:
                # A caption beside an image is part of its content: a new caption makes its unit again.
                content = contents.of(path, status)
                key = content.digest + _key_beside(name, path, media, contents)
                spans = list(_segments(path, size, read, is_utf8=content.is_utf8))
            except OSError as error:
                if is_of_machine(error):
                    raise machine_error(error, str(path)) from error
                why = str(error.strerror or error)
                listing.rejects.append(
                    Rejected(prefix + name, "", "list", "cannot be read", why, "", "", where, 1, size)
                )
                continue
            for start, stop in spans:
                yield Item(where, prefix + name, str(path), (stop or size) - start, key, start, stop, stat=seen)


def _key_beside(name: str, path: Path, media: set[str] | None, contents: Contents) -> str:
    """A key of what files beside a build's one decide about this one: of an image or a sound, its captions; of a text,
    whether it is one.

    Args:
        name, path: the file.
        media: names of images and sounds in the source, without suffix; None: a source of one file.
        contents: of files that were read before.
    """
    stem, suffix = os.path.splitext(name)
    if suffix.lower() in media_suffixes():
        return "".join(f" {file.name} {contents.of(file, file.stat()).digest}" for file in caption_files(path))
    if media is None or stem in media or path.stem in TABLES:
        described = described_file(path, _LONGEST_CAPTIONS)
        return f" {described}" if described else ""
    return ""


def _segments(path: Path, size: int, read: ReadSection, *, is_utf8: bool) -> Iterator[tuple[int, int]]:
    """Segments of a build's file: ranges of a large one of lines in UTF-8; (0, 0) for any other file, which is read
    whole: another encoding is found from all of it."""
    shard_bytes = read.shard_bytes
    if size > shard_bytes and is_utf8:
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if (
            kind_of(path.name, head[:HEAD_BYTES], read.suffixes) in LINES
            and not wide_encoding_of(head)
            and b"\n" in head
        ):
            yield from ((start, min(size, start + shard_bytes)) for start in range(0, size, shard_bytes))
            return
    yield 0, 0


def _refused(reject: Rejected, domain: str = "", prefix: str = "") -> Rejected:
    return replace(reject, path=prefix + printable(reject.path), stage="list", domain=domain)


def _within(wanted: dict[str, list[Item]], read: ReadSection) -> dict[str, list[Item]]:
    """Files of a build within about `max_bytes` in all: small domains give everything, large ones share the rest
    equally."""
    left, chosen = read.max_bytes, {}
    by_size = sorted(wanted, key=lambda name: (sum(item.size for item in wanted[name]), name))
    for number, name in enumerate(by_size):
        share = left // (len(by_size) - number)
        taken: set[int] = set()
        used = 0
        for index in sorted(range(len(wanted[name])), key=lambda i: _draw(read.seed, wanted[name][i])):
            if used + wanted[name][index].size <= share:
                taken.add(index)
                used += wanted[name][index].size
        chosen[name] = [item for index, item in enumerate(wanted[name]) if index in taken]
        left -= used
    return chosen


def _draw(seed: int, item: Item) -> tuple[int, str, int]:
    text = f"{seed}\0{item.domain}\0{item.name}\0{item.start}"
    return xxhash.xxh3_64_intdigest(text.encode()), item.name, item.start


def _shards(items: list[Item], shard_bytes: int) -> Iterator[list[Item]]:
    held: list[Item] = []
    size = 0
    for item in items:
        if held and size + item.size > shard_bytes:
            yield held
            held, size = [], 0
        held.append(item)
        size += item.size
    if held:
        yield held


def _nothing(read: ReadSection, listing: Listing) -> DataError:
    reasons = [f"{r.path}: {r.rule}{'; ' + str(r.value) if r.value else ''}" for r in listing.rejects[:5]]
    better = ""
    if listing.found_bytes and read.max_bytes and listing.left:
        better = "read.max_bytes = 0   (no limit)"
    got = "\n".join(reasons) or (f"files larger than max_bytes = {read.max_bytes}" if read.max_bytes else "no files")
    return BUILD.unusable(", ".join(read.sources.values()) or read.source, got, better)
