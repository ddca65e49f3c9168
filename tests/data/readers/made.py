"""Files of each format, made in memory: what the tests of the readers read."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import wave
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import zstandard
from PIL import Image

from tilewright.data.common.records import Record, Rejected
from tilewright.data.readers.limits import ReadLimits, ReadOptions
from tilewright.data.readers.read_file import read_file

TEXT = "The quick brown fox jumps over the lazy dog.\nA second line: café, naïve, 東京.\n"
LIMITS, OPTIONS = ReadLimits(), ReadOptions()


def read(
    path: Path, limits: ReadLimits = LIMITS, options: ReadOptions = OPTIONS
) -> tuple[list[Record], list[Rejected]]:
    """Records and rejects of a file."""
    items = list(read_file(path, path.name, "d", limits, options))
    return [i for i in items if isinstance(i, Record)], [i for i in items if isinstance(i, Rejected)]


def one(path: Path, **options) -> Record:
    """The only record of a file of which nothing is rejected."""
    records, rejects = read(path, **options)
    assert rejects == []
    assert len(records) == 1, records
    return records[0]


def refusal(path: Path, **options) -> Rejected:
    """The only reject of a file that gives no record."""
    records, rejects = read(path, **options)
    assert records == []
    assert len(rejects) == 1, rejects
    return rejects[0]


def pixels(seed: int = 0, height: int = 48, width: int = 64) -> np.ndarray:
    """Smooth random colours, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def image_bytes(kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels()).save(out, kind, **options)
    return out.getvalue()


def tone(rate: int = 16000, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    """float64 [N] of amplitude 0.5."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def wav_bytes(samples: np.ndarray | None = None, rate: int = 16000, width: int = 2, channels: int = 1) -> bytes:
    """PCM by the standard library."""
    samples = tone(rate) if samples is None else samples
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        data = (scaled + 128).astype(np.uint8).tobytes()
    else:
        data = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(data)
    return out.getvalue()


def sound_bytes(kind: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, tone(), 16000, format=kind)
    return out.getvalue()


def pdf_bytes(pages: list[str], compress: bool = True) -> bytes:
    """A PDF with a line of text on each page, written by hand: ASCII without brackets."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
        extra = b""
        if compress:
            stream, extra = zlib.compress(stream), b" /Filter /FlateDecode"
        objects.append(b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(stream), extra, stream))
        content = len(objects)
        fonts = b"/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] %s /Contents %d 0 R >>" % (fonts, content)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    out, places = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + trailer


def zip_bytes(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def tar_bytes(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def rows_bytes(kind: str) -> bytes:
    """Two rows of text."""
    table, out = pa.table({"text": ["first row", "second row"], "id": [1, 2]}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out)
    elif kind == "arrow":
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    elif kind == "csv":
        out.write(b"text,id\nfirst row,1\nsecond row,2\n")
    elif kind == "json":
        out.write(json.dumps(table.to_pylist()).encode())
    else:
        out.write(b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist()))
    return out.getvalue()


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}

HTML = "<html lang=en><title>A title</title><body><nav><a href=/>Home</a></nav><p>First <b>bold</b> text.</p></body>"


def every_format() -> dict[str, bytes]:
    """A small file of each format by its name."""
    plain = TEXT.encode()
    return {
        "a.txt": plain,
        "koi8.txt": "Все счастливые семьи похожи друг на друга.\n".encode("koi8-r"),
        "wide.txt": TEXT.encode("utf-16"),
        "a.md": b"---\ntitle: T\n---\n# Title\n\nText.\n",
        "a.html": HTML.encode(),
        "a.pdf": pdf_bytes(["One page", "Another page"]),
        **{f"a.{kind}": rows_bytes(kind) for kind in ("jsonl", "json", "csv", "parquet", "arrow")},
        "a.png": image_bytes(),
        "a.jpg": image_bytes("JPEG"),
        "a.gif": image_bytes("GIF"),
        "a.webp": image_bytes("WEBP"),
        "a.tif": image_bytes("TIFF"),
        "a.bmp": image_bytes("BMP"),
        "a.wav": wav_bytes(),
        "a.flac": sound_bytes("FLAC"),
        "a.ogg": sound_bytes("OGG"),
        **{f"a.txt{suffix}": compress(plain) for suffix, compress in COMPRESS.items()},
        "a.zip": zip_bytes({"a.txt": plain, "b/c.png": image_bytes()}),
        "a.tar": tar_bytes({"a.txt": plain, "b/c.wav": wav_bytes()}),
        "a.tgz": gzip.compress(tar_bytes({"a.txt": plain})),
    }
