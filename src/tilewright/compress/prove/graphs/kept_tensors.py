"""Consumers of graphs (`compress.graph`): ids and what is kept of earlier tokens in, logits and what is kept out."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.compress.prove.consumer_session import CACHED_AT, ConsumerSession


class KeptTensors(ConsumerSession):
    """A session of a runtime that `run` calls. Logits are asked in two calls, so that a graph that is wrong after kept
    tokens, or where nothing is kept, cannot pass."""

    empty: Sequence[Any] = ()
    """What is kept before the first token; empty where the graph takes whole rows."""
    _filled: tuple[bytes, Sequence[Any]] = (b"", ())

    def run(self, ids_1S: np.ndarray, past: Sequence[Any]) -> tuple[np.ndarray, Sequence[Any]]:
        """Run a graph with kept tensors: logits [1, S, V], and what is kept. The runtime's own call only: it is what
        latencies measure."""
        raise NotImplementedError

    def logits(self, ids_S: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
        """Compute a row's logits with kept tensors: the first half at once, then all but the last token, then the last
        alone."""
        ids_1S = np.ascontiguousarray(ids_S, dtype=np.int64)[None]
        if not self.empty:
            return self.run(ids_1S, ())[0][0, positions_P]
        length = ids_1S.shape[1]
        found, past = [], self.empty
        for start, end in ((0, length // 2), (length // 2, length - 1), (length - 1, length)):
            if end > start:
                logits, past = self.run(ids_1S[:, start:end], past)
                found.append(np.array(logits[0]))
        return np.concatenate(found)[positions_P]

    def prefill_s(self, ids_S: np.ndarray) -> float:
        """Time a prefill of a graph with kept tensors, in seconds: one call with nothing kept."""
        ids_1S = np.ascontiguousarray(ids_S, dtype=np.int64)[None]
        started = time.perf_counter()
        self.run(ids_1S, self.empty)
        return time.perf_counter() - started

    def cached_token_s(self, ids_S: np.ndarray) -> float | None:
        """Time a cached token of a graph with kept tensors, in seconds: one call for the last token, after the others
        are kept."""
        if not self.empty or len(ids_S) > CACHED_AT + 1:
            return None
        ids_1S = np.ascontiguousarray(ids_S, dtype=np.int64)[None]
        if self._filled[0] != ids_1S[:, :-1].tobytes():
            self._filled = ids_1S[:, :-1].tobytes(), self.run(ids_1S[:, :-1], self.empty)[1]
        started = time.perf_counter()
        self.run(ids_1S[:, -1:], self._filled[1])
        return time.perf_counter() - started
