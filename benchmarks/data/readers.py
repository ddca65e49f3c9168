"""How fast each format of raw files becomes records, on one core: MB/s of the files and files/s.

Makes a folder of files of each format, reads it, and counts processor time, of the parser's process too.

python -m benchmarks.data.readers
"""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import tempfile
import wave
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import zstandard
from PIL import Image

from benchmarks.common import machine_kind, parser_of, spread, write_result
from tilewright.data.common.records import Record
from tilewright.data.readers.limits import ReadOptions
from tilewright.data.readers.open import read_file

CLAIM = "reading raw files into records takes less time than the other stages of a build: 1 MB/s a core through all"
ROUNDS, TARGET_BYTES, MOST_FILES = 3, 8 << 20, 200
WORDS = [
    "the",
    "of",
    "a",
    "small",
    "river",
    "town",
    "where",
    "people",
    "walked",
    "slowly",
    "home",
    "after",
    "work",
    "and",
    "told",
    "each",
    "other",
    "old",
    "stories",
]
RUSSIAN = [
    "все",
    "счастливые",
    "семьи",
    "похожи",
    "друг",
    "на",
    "друга",
    "каждая",
    "несчастливая",
    "семья",
    "несчастлива",
    "по",
    "своему",
]


def prose(rng: np.random.Generator, num_bytes: int, words: list[str] = WORDS) -> str:
    """Lines of random words with numbers between them."""
    lines, size = [], 0
    while size < num_bytes:
        line = " ".join(rng.choice(words, 12)) + f" {rng.integers(1 << 30)}.\n"
        lines.append(line)
        size += len(line)
    return "".join(lines)


def pdf(rng: np.random.Generator) -> bytes:
    """Twenty pages of forty lines."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for _ in range(20):
        lines = "".join(f"({line}) Tj T*\n" for line in prose(rng, 2600).splitlines())
        stream = zlib.compress(f"BT /F1 10 Tf 12 TL 50 750 Td\n{lines}ET".encode())
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(stream), stream))
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R " % len(objects)
        objects.append(page + b"/Resources << /Font << /F1 3 0 R >> >> >>")
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    out, places = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        *(size, table, size, len(out)),
    )


def html(rng: np.random.Generator) -> bytes:
    """A page of 60 KiB: half of it text, the rest tags, links and a script."""
    parts = "".join(
        f'<div class="c{i}"><h2>Part {i}</h2><p>{prose(rng, 700)}</p><ul><li><a href="/page/{i}">next</a></li></ul>'
        f'<img src="pictures/{i}.png" alt="picture {i}"></div>'
        for i in range(40)
    )
    script = "<script>var x = 1; function f() { return x + 1 }</script>" * 200
    return f"<!doctype html><html><title>t</title>{script}<body><nav>menu</nav><main>{parts}</main></body>".encode()


def picture(rng: np.random.Generator, kind: str) -> bytes:
    """640 x 480 pixels, smooth."""
    small = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    out = io.BytesIO()
    small.resize((640, 480), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


def sound(rng: np.random.Generator, kind: str) -> bytes:
    """Ten seconds of noise and tone at 16 kHz."""
    samples = 0.2 * np.sin(np.arange(160_000) / 7) + rng.normal(0, 0.02, 160_000)
    out = io.BytesIO()
    if kind != "WAV":
        soundfile.write(out, samples, 16000, format=kind)
        return out.getvalue()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return out.getvalue()


def rows(rng: np.random.Generator, kind: str) -> bytes:
    """A thousand rows of a kilobyte."""
    texts = [prose(rng, 1000) for _ in range(1000)]
    out = io.BytesIO()
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), out)
    else:
        out.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    return out.getvalue()


def archive(rng: np.random.Generator, kind: str) -> bytes:
    """Fifty members of 20 KiB."""
    out = io.BytesIO()
    members = {f"{i}.txt": prose(rng, 20_000).encode() for i in range(50)}
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in members.items():
                file.writestr(name, data)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def squeeze(compress: Callable[[bytes], bytes]) -> Callable[[np.random.Generator], bytes]:
    """Half a megabyte of prose, compressed."""
    return lambda rng: compress(prose(rng, 1 << 19).encode())


FORMATS: dict[str, tuple[str, Callable[[np.random.Generator], bytes], ReadOptions]] = {
    "text, UTF-8": (".txt", lambda rng: prose(rng, 1 << 18).encode(), ReadOptions()),
    "text, UTF-8, Cyrillic": (".txt", lambda rng: prose(rng, 1 << 17, RUSSIAN).encode(), ReadOptions()),
    "text, KOI8-R": (".txt", lambda rng: prose(rng, 1 << 17, RUSSIAN).encode("koi8-r"), ReadOptions()),
    "text, UTF-16": (".txt", lambda rng: prose(rng, 1 << 17).encode("utf-16"), ReadOptions()),
    "text, a mojibake line in ten": (
        ".txt",
        lambda rng: ("".join([prose(rng, 900), "cafÃ© naÃ¯ve â€œquotedâ€\x9d\n"]) * 100).encode(),
        ReadOptions(),
    ),
    "text with language": (".txt", lambda rng: prose(rng, 1 << 12).encode(), ReadOptions(language=True)),
    "Markdown": (".md", lambda rng: b"# Title\n\n" + prose(rng, 1 << 14).encode(), ReadOptions()),
    "HTML": (".html", html, ReadOptions()),
    "PDF": (".pdf", pdf, ReadOptions()),
    "JSON lines": (".jsonl", lambda rng: rows(rng, "jsonl"), ReadOptions()),
    "Parquet": (".parquet", lambda rng: rows(rng, "parquet"), ReadOptions()),
    "gzip": (".txt.gz", squeeze(gzip.compress), ReadOptions()),
    "Zstandard": (".txt.zst", squeeze(zstandard.ZstdCompressor().compress), ReadOptions()),
    "xz": (".txt.xz", squeeze(lzma.compress), ReadOptions()),
    "bzip2": (".txt.bz2", squeeze(bz2.compress), ReadOptions()),
    "zip": (".zip", lambda rng: archive(rng, "zip"), ReadOptions()),
    "tar": (".tar", lambda rng: archive(rng, "tar"), ReadOptions()),
    "PNG": (".png", lambda rng: picture(rng, "PNG"), ReadOptions()),
    "JPEG": (".jpg", lambda rng: picture(rng, "JPEG"), ReadOptions()),
    "JPEG with pixels": (".jpg", lambda rng: picture(rng, "JPEG"), ReadOptions(image_size=224)),
    "WAV": (".wav", lambda rng: sound(rng, "WAV"), ReadOptions()),
    "FLAC": (".flac", lambda rng: sound(rng, "FLAC"), ReadOptions()),
    "WAV with log-mel frames": (".wav", lambda rng: sound(rng, "WAV"), ReadOptions(log_mel=True)),
}


def processor_s() -> float:
    """Processor seconds of this process and the parser that it started."""
    every = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in every))


def measure(folder: Path, name: str) -> dict:
    """Rates of one format, warm."""
    suffix, make, options = FORMATS[name]
    rng, paths, size = np.random.default_rng(0), [], 0
    while size < TARGET_BYTES and len(paths) < MOST_FILES:
        path = folder / f"{len(paths)}{suffix}"
        path.write_bytes(make(rng))
        size += path.stat().st_size
        paths.append(path)
    list(read_file(paths[0], "0", "d", options=options))
    rates, text = [], 0
    for _ in range(ROUNDS):
        before, text = processor_s(), 0
        for path in paths:
            items = list(read_file(path, path.name, "d", options=options))
            assert all(isinstance(item, Record) for item in items), items[0]
            text += sum(len(item.text.encode()) for item in items if isinstance(item, Record))
        rates.append(size / (processor_s() - before) / 1e6)
    middle = spread(rates)
    rate = {"files": len(paths), "file_bytes": size, "text_bytes": text, "mb_per_s": middle}
    return rate | {"files_per_s": round(middle["median"] * 1e6 * len(paths) / size, 1)}


def main() -> None:
    """Measure every format and write the result."""
    parser_of(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {}
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(Path(folder), name)
        rate = results[name]
        print(f"{name:30} {rate['mb_per_s']['median']:9.2f} MB/s {rate['files_per_s']:9.1f} files/s", flush=True)
    write_result(f"readers_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
