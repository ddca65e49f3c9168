"""Errors of other projects' parsers: those of damaged files, and those of this machine.

Without numpy, whose threads take address space from one.
"""

import lzma
import struct
import wave
import zipfile
import zlib

from tilewright.core.errors import check_damage

PARSER_ERRORS = (
    *(ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError, SyntaxError),
    *(OSError, EOFError, RuntimeError, MemoryError, BufferError),
    *(struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, zipfile.LargeZipFile, wave.Error),
)
"""By experience with random files. Only around calls of such parsers."""


def damage_of(error: BaseException) -> str:
    """The message of a parser's error on a damaged file, in one line.

    Raises:
        OSError, MemoryError: it speaks of this machine, or of a file that cannot be read.
    """
    check_damage(error)
    return failure(error)


def only_damage(error: BaseException) -> None:
    """Raise an error of this machine again, and let errors of damaged files pass. Memory is the document's limit in the
    parser's process."""
    if isinstance(error, OSError):
        check_damage(error)


def failure(error: BaseException) -> str:
    """The message of an error, of damage or of this machine, in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
