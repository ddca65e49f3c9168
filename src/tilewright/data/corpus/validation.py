"""The user's own validation text: read beside the training text, held out whole, and compared with it.

What is in both is counted and said; it stays in both, because the user divided them.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.common.progress import ProgressBar
from tilewright.data.corpus.read import Convert, Spool, collect
from tilewright.data.dataset.account import Account
from tilewright.data.sources.source_parts import Source


@dataclass(frozen=True)
class Validation:
    """Documents of a spool that are the user's validation text: all from `first` on.

    Args:
        first: index of a document.
        label: where they are from.
        account: what became of what was found there.
    """

    first: int
    label: str
    account: Account

    def note(self, cluster_of: np.ndarray, digests: list[bytes]) -> str:
        """How many of its documents are in the training text too, or nearly.

        Args:
            cluster_of: int64 [documents], of near-copies.
            digests: of the text of each document.
        """
        trained = set(digests[: self.first])
        same = np.array([digest in trained for digest in digests[self.first :]], bool)
        near = np.isin(cluster_of[self.first :], cluster_of[: self.first]) & ~same
        number = len(same)
        if not same.any() and not near.any():
            return f"{self.label}: none of {number:,} documents is in the training data"
        return (
            f"{self.label}: of {number:,} documents {int(same.sum()):,} are in the training data too and "
            f"{int(near.sum()):,} have a near-copy there; what they measure is partly memory"
        )

    def summary(self) -> dict[str, Any]:
        """The account of the validation text as plain JSON."""
        return {"source": self.label} | self.account.summary()


def add_validation(
    spool: Spool, source: Source, path: Path, *, seed: int, progress: ProgressBar, convert: Convert | None = None
) -> Validation:
    """Read all of `source` behind the documents of `spool`, into its file.

    A domain that both have is one; where the training text has a single domain, all belongs to that.

    Args:
        spool: of the training text.
        source: of the validation text.
        path: of a file to read into.
        seed: order of its parts.
        progress: shows a phase.
        convert: see `read.collect`.

    Raises:
        DataError: nothing usable in it.
    """
    how = {} if convert is None else {"convert": convert}
    other = collect(source, path, domains=(), max_bytes=0, seed=seed, progress=progress, **how)
    first, end = len(spool), int(spool.lengths.sum())
    with spool.path.open("ab") as to, path.open("rb") as file:
        shutil.copyfileobj(file, to)
    path.unlink()
    names = list(spool.domains)
    single = names[0] if len(names) == 1 else ""
    for name in other.domains:
        if not single and name not in names:
            names.append(name)
    index = np.array([names.index(single or name) for name in other.domains], np.int32)
    spool.domains = tuple(names)
    spool.names += other.names
    spool.records += other.records
    spool.domain_of = np.concatenate([spool.domain_of, index[other.domain_of]])
    spool.offsets = np.concatenate([spool.offsets, other.offsets + end])
    spool.lengths = np.concatenate([spool.lengths, other.lengths])
    return Validation(first, source.label, other.account)
