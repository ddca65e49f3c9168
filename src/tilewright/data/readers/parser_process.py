"""A process that parses HTML, PDF, notebooks, .docx and EPUB.

So a document that hangs its parser, or eats memory, ends that one alone.

An HTML parser takes minutes for a megabyte of open tags, and a Python loop in a PDF may never end; neither can be
interrupted from within. See `common.limited_process`.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tilewright.core.errors import is_damage
from tilewright.data.common.limited_process import LimitedProcess, serve
from tilewright.data.readers.parser_errors import PARSER_ERRORS, failure
from tilewright.data.readers.text import html_and_pdf, notebooks_and_books


@lru_cache(maxsize=1)
def parser_process(pid: int) -> LimitedProcess:
    """The process that parses documents for the process `pid`, which must be the caller: after a fork, the child gets
    one of its own.

    Its requests: "kind" html, notebook, docx, epub or pdf, and the arguments of the function in `parse` or `packed`.
    """
    assert pid == os.getpid()
    return LimitedProcess(__name__)


def _answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        kind, most = request["kind"], request.get("max_bytes", 0)
        if kind == "html":
            yield html_and_pdf.html_document(request["html"])
        elif kind == "notebook":
            yield notebooks_and_books.notebook_document(request["text"])
        elif kind == "docx":
            yield notebooks_and_books.word_document(request["path"], most)
        elif kind == "epub":
            yield from notebooks_and_books.book_chapters(request["path"], most)
        else:
            yield from html_and_pdf.pdf_pages(request["path"], request["max_pages"], most)
    except notebooks_and_books.TooLargeError as error:
        yield {"error": str(error), "large": True}
    except PARSER_ERRORS as error:
        if isinstance(error, OSError) and not is_damage(error):  # for the process that asked to raise
            yield {"errno": error.errno, "error": str(error.strerror)}
        else:
            yield {"error": failure(error)}


if __name__ == "__main__":
    serve(_answer)
