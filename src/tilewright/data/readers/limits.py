"""How much of a file the readers of a data build take before they set it aside, and what they make on request."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReadLimits:
    """Bounds on what one file may cost. What passes one is rejected with its number and the bound as threshold.

    None of them bounds the size of a plain file: text and rows are read in pieces.
    """

    ratio: float = 256.0
    """Bytes out of one compressed byte, above 4 MiB that are free. Prose has 3 to 10, logs and tables up to 100."""
    unpacked_bytes: int = 4 << 30
    """Bytes that a compressed file, or an archive with all of its members, may unpack to. They go to temporary
    files."""
    document_bytes: int = 32 << 20
    """Bytes of a document that is in memory whole: HTML, a notebook, a caption; of a PDF, a .docx or an EPUB,
    its text and each of its parts."""
    line_bytes: int = 16 << 20
    """Bytes of a line of text or a row."""
    members: int = 100_000
    """Files in an archive."""
    depth: int = 3
    """Archives and compressed files inside of each other; `a.tar.gz` are two."""
    pixels: int = 1 << 26
    """Width times height of an image. Decoded, a pixel takes up to 10 bytes of memory."""
    audio_s: float = 7200.0
    """Seconds of sound. A second of log-mel frames takes 32 kB."""
    pages: int = 5000
    """Pages of a PDF that are read; the pages after them are rejected."""
    parse_s: int = 60
    """Processor seconds for one HTML document, notebook, PDF, .docx or EPUB: a process of its own reads it, which ends
    then."""
    parse_memory_bytes: int = 1 << 30
    """Address space of that process."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of the readers of a data build beyond the plain text and facts of a file.

    `suffixes` says what files of a suffix are (`file_kinds.KINDS`), before what is known of it. `text_field` is the
    field of rows that holds the text. `image_size` asks for pixels: uint8 [3, size, size], the middle square scaled; 0:
    none. `log_mel` asks for float32 [frames, num_mels] of windows of `window_ms` milliseconds each `hop_ms`. `language`
    asks for the language of texts.
    """

    text_field: str | None = "text"
    image_size: int = 0
    log_mel: bool = False
    num_mels: int = 80
    window_ms: float = 25.0
    hop_ms: float = 10.0
    language: bool = False
    suffixes: Mapping[str, str] = field(default_factory=dict)
