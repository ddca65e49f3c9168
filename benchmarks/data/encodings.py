"""How many files of a set of encodings are read as they were written.

The set is a folder in the layout of chardet's tests: a folder per encoding, named by it and maybe a language, such as
`iso-8859-2-czech`. Labels mean what browsers mean. A file counts where its whole text is right.

git clone https://github.com/chardet/chardet && python -m benchmarks.data.encodings chardet/tests
"""

import argparse
import time
from pathlib import Path

from benchmarks.common import write_result
from tilewright.data.readers.text.detect import codec_of, declared_encoding, find_encoding
from tilewright.data.readers.text.encodings import decode_text, wide_encoding_of

CLAIM = "at least 99 % of the files of chardet's tests are read as they were written"
_WIDE = ("utf-16", "utf-32", "iso-2022")


def truth(folder: str) -> str:
    """The codec that the name of a folder says; "" where Python has none."""
    if folder == "MacRoman":
        return "mac_roman"
    parts = folder.lower().split("-")
    names = ["-".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if folder.lower().startswith(_WIDE):
        return next(name for name in names if name.startswith(_WIDE)).replace("16be", "16-be").replace("16le", "16-le")
    return next((codec for name in names if (codec := codec_of(name))), "")


def read(data: bytes, *, declared: bool) -> str:
    """The text of a file."""
    wide = wide_encoding_of(data[: 1 << 16])
    if wide:
        return data.decode(wide, "replace")
    data = data.removeprefix(b"\xef\xbb\xbf")
    return decode_text(data, declared_encoding(data) if declared else "").text


def main() -> None:
    """Read every file with and without its declaration, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    counts = {"files": 0, "right": 0, "right_without_declarations": 0, "bytes": 0}
    wrong, no_codec, seconds = [], [], 0.0
    for folder in sorted(path for path in arguments.folder.iterdir() if path.is_dir()):
        codec = truth(folder.name)
        if not codec:
            no_codec.append(folder.name)
            continue
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            text = data.decode(codec, "replace").lstrip("\ufeff")
            started = time.process_time()
            right = read(data, declared=True).lstrip("\ufeff") == text
            seconds += time.process_time() - started
            counts["files"] += 1
            counts["bytes"] += len(data)
            counts["right"] += right
            counts["right_without_declarations"] += read(data, declared=False).lstrip("\ufeff") == text
            if not right:
                found = find_encoding(data)[0]
                wrong.append(f"{folder.name}/{path.name}: {codec}, read as {found or 'none'}")
    print(counts, *wrong, sep="\n")
    rate = round(counts["bytes"] / seconds / 1e6, 1)
    write_result("encodings", CLAIM, {**counts, "wrong": wrong, "no_codec": no_codec, "mb_per_s": rate})


if __name__ == "__main__":
    main()
