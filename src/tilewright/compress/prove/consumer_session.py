"""The child's side of a proof: a consumer opens an artefact and answers what the parent asks, in files.

A consumer script is a module of this folder that ends in

    if __name__ == "__main__":
        serve(MySession)

and runs as `python -m tilewright.compress.prove.my_module REQUEST.json`. Its last act is answer.json: without that file
the proof has failed, whatever the exit code. What it prints goes to a log, whose last lines are the reason then.

Legend: S positions of a row  P positions that are asked for  V vocabulary.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.compress.prove.graphs.image_question import ImageQuestion
from tilewright.compress.prove.question import Question
from tilewright.core.atomic_io import write_whole

PREFILL_LENGTHS = (32, 256)
IMAGES = (1, 32)
"""Images of a pass that is measured."""
CACHED_AT = 256
"""Tokens before the one whose latency is measured."""


@dataclass(frozen=True)
class Request:
    """The parent's request; the content of REQUEST.json.

    Args:
        artefact: file or folder.
        question: folder written by `Question.save`.
        answer: existing folder for `logits.npy`, `token_ids.json` and `answer.json`.
        threads: that the runtime may use.
        repeats: of each measured call, after one that is not counted.
        options: of the target's own.
    """

    artefact: str
    question: str
    answer: str
    threads: int
    repeats: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConsumerAnswer:
    """The content of answer.json. None: the runtime cannot tell, or has no such thing.

    Args:
        runtime: name and version.
        prefill_s: tokens -> seconds, median.
        cached_token_s: one token after `cached_at` others, median.
        cached_at: `CACHED_AT`, or what the runtime takes.
        peak_bytes: of the process, highest resident memory.
        load_s: seconds to open the artefact.
        quantized: operators by format, as the runtime has them.
        notes: in words.
        facts: see `ConsumerSession.facts`.
        image_s: images in a pass -> seconds, median.
    """

    runtime: str
    load_s: float
    peak_bytes: int
    prefill_s: Mapping[str, float] = field(default_factory=dict)
    cached_token_s: float | None = None
    cached_at: int = CACHED_AT
    quantized: Mapping[str, int] | None = None
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    image_s: Mapping[str, float] = field(default_factory=dict)


class ConsumerSession:
    """An artefact that its runtime has opened. Subclasses are constructed with a `Request`."""

    runtime = ""
    """Name and version of the runtime, set when it is open."""
    max_length = CACHED_AT + 1
    """Most tokens of a row that the runtime takes; latencies are measured on shorter rows where it takes fewer."""

    def __init__(self, request: Request):
        self.request = request
        self.notes: list[str] = []

    def logits(self, ids_S: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
        """A consumer's logits or log-probabilities [P, V] at positions of one row of ids, in its session."""
        raise NotImplementedError

    def image_logits(self, pixels_B3HW: np.ndarray) -> np.ndarray:
        """A consumer's logits [B, C] of images in its session; of consumers that such models are exported for."""
        raise NotImplementedError

    def token_ids(self, texts: Sequence[str], special: bool = False) -> list[list[int]] | None:
        """A consumer's ids of texts in its session, by the tokenizer in the artefact; None where it has none.

        Args:
            texts: whose special tokens are text.
            special: with the begin and end that the artefact's tokenizer puts around a text.
        """
        return None

    def facts(self) -> Mapping[str, Any]:
        """Facts in a consumer's session that the artefact tells this runtime: "positions", the most that the model
        knows, and "chat_template"; what it cannot tell is left out."""
        return {}

    def prefill_s(self, ids_S: np.ndarray) -> float:
        """A consumer's seconds for the logits after a row of ids, nothing of it cached, in its session."""
        raise NotImplementedError

    def cached_token_s(self, ids_S: np.ndarray) -> float | None:
        """A consumer's seconds for one more token in its session, all but the last of `ids_S` being cached; None where
        there is no cache."""
        return None

    def quantized(self) -> Mapping[str, int] | None:
        """Operators of a consumer's session by the format that they compute in, such as {"MatMulInteger": 43}."""
        return None


def serve(open_session: Callable[[Request], ConsumerSession]) -> None:
    """Serve a consumer's session: answer the request that the command line names."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(request.answer)
    started = time.perf_counter()
    session = open_session(request)
    load_s = time.perf_counter() - started
    _say("loaded")
    images = ImageQuestion.load(Path(request.question))
    if images is not None:
        answer = _of_images(session, images, folder, load_s)
    else:
        answer = _of_text(session, Question.load(Path(request.question)), folder, load_s)
    write_whole(folder / "answer.json", json.dumps(asdict(answer)))
    _say("answered")


def _of_images(session: ConsumerSession, question: ImageQuestion, folder: Path, load_s: float) -> ConsumerAnswer:
    np.save(folder / "logits.npy", np.concatenate([session.image_logits(pixels) for pixels in question.batches()]))
    _say("logits")
    seconds = {}
    for number in IMAGES:
        pixels = np.resize(question.pixels_N3HW, (number, *question.pixels_N3HW.shape[1:]))
        seconds[str(number)] = _median(session.request.repeats, lambda pixels=pixels: _seconds_of(session, pixels))
    return ConsumerAnswer(
        session.runtime, load_s, peak_bytes(), quantized=session.quantized(), notes=session.notes, image_s=seconds
    )


def _seconds_of(session: ConsumerSession, pixels_B3HW: np.ndarray) -> float:
    began = time.perf_counter()
    session.image_logits(pixels_B3HW)
    return time.perf_counter() - began


def _of_text(session: ConsumerSession, question: Question, folder: Path, load_s: float) -> ConsumerAnswer:
    np.save(folder / "logits.npy", _all_logits(session, question))
    _say("logits")
    ids = session.token_ids(question.texts)
    if ids is not None:
        special = session.token_ids([question.texts[i] for i in question.special], special=True)
        both = {"plain": ids, "special": special}
        (folder / "token_ids.json").write_text(json.dumps(both), encoding="utf-8")
    _say("token ids")
    ids_S, repeats = question.long_row[: session.max_length], session.request.repeats
    lengths = sorted({min(length, len(ids_S)) for length in PREFILL_LENGTHS})
    prefill = {str(n): _median(repeats, lambda n=n: session.prefill_s(ids_S[:n])) for n in lengths}
    cached = None
    if session.cached_token_s(ids_S) is not None:
        cached = _median(repeats, lambda: session.cached_token_s(ids_S) or 0.0)
    return ConsumerAnswer(
        session.runtime,
        load_s,
        peak_bytes(),
        prefill,
        cached,
        len(ids_S) - 1,
        session.quantized(),
        tuple(session.notes),
        session.facts(),
    )


def _all_logits(session: ConsumerSession, question: Question) -> np.ndarray:
    """All logits of a consumer's session, [N, V] FP32, in the order of `Question.positions`."""
    found = []
    for row, ids_S in enumerate(question.rows):
        asked = question.positions_N2[question.positions_N2[:, 0] == row, 1]
        if len(asked):
            found.append(np.asarray(session.logits(ids_S, asked), dtype=np.float32))
            _say(f"row {row + 1} of {len(question.rows)}")
    return np.concatenate(found)


def _median(repeats: int, seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(repeats))


def peak_bytes() -> int:
    """Highest resident memory of the consumer's process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss begins with that of the process that started this one
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _say(text: str) -> None:
    print(text, flush=True)
