"""The question to every consumer of a run, the same for all: rows of held-out ids, and where in them to answer.

It is a folder: `tokens.npy` [R, S] int64, rows padded with -1; `positions.npy` [N, 2] int64 (row, position), sorted;
`long_row.npy` int64, for latencies; `texts.json`, texts to tokenise, and which of them with begin and end.

Legend: R rows  S positions  N answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PADDING = -1


@dataclass(frozen=True)
class Question:
    """Rows and positions.

    Args:
        rows: token ids of each row, without padding.
        positions_N2: (row, position) of each asked distribution, sorted by row, then position.
        long_row: ids to measure latency on; shorter where the model takes no 257.
        texts: whose ids are asked for.
        special: indices of texts that are asked for with begin and end, too.
    """

    rows: Sequence[np.ndarray]
    positions_N2: np.ndarray
    long_row: np.ndarray
    texts: Sequence[str]
    special: Sequence[int] = ()

    def save(self, folder: Path) -> None:
        """Write the files of a question to consumers; `folder` exists."""
        tokens_RS = np.full((len(self.rows), max(map(len, self.rows))), PADDING, np.int64)
        for row, ids in zip(tokens_RS, self.rows, strict=True):
            row[: len(ids)] = ids
        np.save(folder / "tokens.npy", tokens_RS)
        np.save(folder / "positions.npy", self.positions_N2)
        np.save(folder / "long_row.npy", self.long_row)
        texts = {"texts": list(self.texts), "special": list(self.special)}
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Question":
        """Read the question to consumers that `save` wrote."""
        tokens_RS = np.load(folder / "tokens.npy", allow_pickle=False)
        return cls(
            rows=[row[row != PADDING] for row in tokens_RS],
            positions_N2=np.load(folder / "positions.npy", allow_pickle=False),
            long_row=np.load(folder / "long_row.npy", allow_pickle=False),
            **json.loads((folder / "texts.json").read_text(encoding="utf-8")),
        )
