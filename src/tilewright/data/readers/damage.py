"""What parsers of other projects raise on damaged files. Without numpy, whose threads take address space from one."""

import lzma
import struct
import wave
import zipfile
import zlib

PARSER_ERRORS = (
    *(ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError, SyntaxError),
    *(OSError, EOFError, RuntimeError, MemoryError, BufferError),
    *(struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, zipfile.LargeZipFile, wave.Error),
)
"""By experience with random files. Only around calls of such parsers."""


def failure(error: BaseException) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
