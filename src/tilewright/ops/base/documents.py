"""Where the documents of packed rows begin: what attention kernels for sequences of any length are given.

Found once per micro-batch and handed to all layers. Where the kernels of a device read a mask, or compare `segments`
themselves, nothing is found and `segments` is handed on as it is.

Legend: B rows  S positions  N documents of all rows, padding at the end of a row being one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.core.errors import DataError

STARTS = "document_starts"
"""Name in a batch of what `document_starts` gives, on the host: then no device has to be waited for."""
LEAST = 128
"""Lengths are bounds, so they are rounded up: to this at least, and to a power of two. Code that is compiled for one
bound is then used again."""


class Documents(NamedTuple):
    """Documents of the rows of one micro-batch."""

    segments_BS: Tensor
    """[B, S] integers, equal within a document."""
    starts_N1: Tensor
    """[N + 1] int32 on the same device: first tokens of documents in all rows behind each other, and the end."""
    longest: int
    """At least the tokens of the longest document."""


Segments = Tensor | Documents | None
"""What layers hand to attention: documents of packed rows; None where each row is one."""


def document_starts(segments_BS: Tensor) -> Tensor:
    """Find the first tokens of documents, all rows behind each other, and the end: [N + 1] int32, on their device.

    Waits for a device, since the number of documents is the length of the result.

    Args:
        segments_BS: [B, S] integers, equal within a document.

    Raises:
        DataError: a document is in pieces, other tokens between them. Kernels by `segments` would see one document and
            those by starts two.

    Example:
        >>> document_starts(torch.tensor([[0, 0, 1, -1], [5, 5, 5, 5]])).tolist()
        [0, 2, 3, 4, 8]
    """
    rows, length = segments_BS.shape
    first_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    first_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    starts_N = first_BS.flatten().nonzero()[:, 0]
    named_N = starts_N // max(length, 1) * 2**33 + segments_BS.flatten()[starts_N]
    pieces = len(starts_N) - len(named_N.unique())
    if pieces:
        raise DataError(
            "Document of a packed row is in pieces",
            got=f"`segments` with {pieces} values that come again in their row, after other ones",
            need="`segments` [B, S] whose equal values stand together in each row",
            try_="number the documents of a row in order: 0, 0, 1, 1, 1, ..., -1 for padding",
        )
    return torch.cat((starts_N, starts_N.new_tensor([rows * length]))).int()


def documents_of(segments_BS: Tensor, host_starts_N1: Tensor | None = None) -> Documents:
    """The documents of packed rows.

    Args:
        segments_BS: [B, S] integers, equal within a document.
        host_starts_N1: what `document_starts` found on the host; None finds it here, and waits for the device.

    Raises:
        DataError: see `document_starts`.
    """
    starts_N1 = document_starts(segments_BS) if host_starts_N1 is None else host_starts_N1
    longest = int(starts_N1.diff().max()) if len(starts_N1) > 1 else 0
    return Documents(segments_BS, starts_N1.to(segments_BS.device, non_blocking=True), bound(longest))


def document_tensors(segments: Segments) -> dict[str, Tensor]:
    """The documents as tensors alone, which `documents_from` takes."""
    if isinstance(segments, Documents):
        longest = torch.tensor(segments.longest)  # on the host, where it is read
        return {"segments": segments.segments_BS, "starts": segments.starts_N1, "longest": longest}
    return {} if segments is None else {"segments": segments}


def documents_from(tensors: Mapping[str, Tensor]) -> Segments:
    """The documents from what was given to `document_tensors`."""
    if "starts" in tensors:
        return Documents(tensors["segments"], tensors["starts"], int(tensors["longest"]))
    return tensors.get("segments")


def rows_as_documents(num_rows: int, length: int, device: torch.device) -> tuple[Tensor, int]:
    """Rows as documents: `starts_N1` and `longest` where each row is one."""
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length, max(length, LEAST)


def bound(length: int) -> int:
    """Bound of documents' lengths, rounded up.

    Example:
        >>> bound(5), bound(128), bound(129)
        (128, 128, 256)
    """
    return max(LEAST, 1 << (length - 1).bit_length()) if length else LEAST


def segments_of(segments: Segments) -> Tensor | None:
    """Segments [B, S] of documents; None where each row is one."""
    return segments.segments_BS if isinstance(segments, Documents) else segments
