"""Failures of a disk, in one line, and the same on all ranks: a save fails everywhere or nowhere."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tilewright.parallel.agree import gather

T = TypeVar("T")

DISK_ERRORS = (OSError, CheckpointException, RuntimeError)
"""Errors of a write. RuntimeError: torch's zip writer reports a failed write that way, not as OSError; so does gloo
where another rank has died."""


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    reason: str
    is_full: bool
    """For want of room on the disk."""


class RanksFailedError(RuntimeError):
    """Some ranks failed; raised on all of them, with the same text.

    Args:
        failures: by rank.
    """

    def __init__(self, failures: list[RankFailure]) -> None:
        super().__init__("; ".join(f"rank {failure.rank}: {failure.reason}" for failure in failures))
        self.failures = failures


def on_all(group: dist.ProcessGroup | None, work: Callable[[], T], done: Callable[[], None] = lambda: None) -> list[T]:
    """The results of `work` by rank, its failures the same on all.

    Args:
        group: whose ranks all call this; None for one process, which then raises what its work raises.
        work: of this rank.
        done: called once it is over; this rank waits for others then.

    Raises:
        RanksFailedError: a rank's work raised one of `DISK_ERRORS`; on all ranks.
    """
    if group is None:
        return [work()]
    found: tuple[T | None, RankFailure | None]
    try:
        found = work(), None
    except DISK_ERRORS as error:
        found = None, RankFailure(dist.get_rank(group), short_reason(error), is_full(error))
    done()
    results = gather(group, found)
    failures = [failure for _, failure in results if failure is not None]
    if failures:
        raise RanksFailedError(failures)
    return [value for value, _ in results]  # type: ignore[misc] - no failure, so a value


def of_dcp(error: CheckpointException) -> RanksFailedError:
    """The failures that DCP has gathered from the ranks."""
    failures = [RankFailure(rank, short_reason(inner), is_full(inner)) for rank, (inner, _) in error.failures.items()]
    return RanksFailedError(sorted(failures, key=lambda failure: failure.rank))


def short_reason(error: BaseException) -> str:
    """Shorten a checkpoint's failure to one line: the error inside DCP's wrapper, and the disk's own error behind it if
    there is one.

    torch's zip writer raises "unexpected pos" while the OSError that caused it is being handled.
    """
    if isinstance(error, RanksFailedError):
        return str(error)
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    error = disk_error(error) or error
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def disk_error(error: BaseException) -> OSError | None:
    """The disk's own failure behind another error."""
    return next(iter([link for link in _chain(error) if isinstance(link, OSError)][::-1]), None)


def is_full(error: BaseException) -> bool:
    """True of a failure since the disk or the user's quota is full."""
    if isinstance(error, RanksFailedError):
        return any(failure.is_full for failure in error.failures)
    return any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """List a failure's chain of errors: each error, the one inside DCP's wrapper, and the one that was being handled
    when it was raised."""
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            yield from _chain(inner)
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
