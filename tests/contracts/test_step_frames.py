"""A step that a reader can follow: few frames from the training loop to the loss, few files of ours in a step, and
before the first one.

One steady step of a real run is traced: everything that Python calls from the beginning of the third step's first
forward pass to that of the fourth's, which is one turn of the loop in `Run.train`.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import tilewright
from tests.training.tiny import tiny, write_text
from tilewright.models.decoder.decoder import Decoder
from tilewright.training.run import Run
from tilewright.training.session import train

PACKAGE = Path(tilewright.__file__).parent
ELSEWHERE = ("models", "ops", "optim", "data")
"""What a step computes with; the rest decides what a step is."""
MICROBATCHES, STEP = 2, 3
MOST_FRAMES, MOST_FILES = 5, 8
MOST_BEFORE = 129
"""Files from the recipe to the first loss: 121 at the time of writing, of which planning takes 28. What one more file
says has to have a place in those that are passed anyhow, or be read later."""


class StepTrace:
    """Calls of Python functions in one step. A context manager around a run.

    Args:
        loop: code of the training loop.
        loss: code of the model's loss.
    """

    def __init__(self, loop: CodeType, loss: CodeType) -> None:
        self.loop, self.loss = loop, loss
        self.calls: Counter[CodeType] = Counter()
        self.between: list[CodeType] = []
        """From the loop down to the loss, both left out."""
        self.before: set[CodeType] = set()
        """Called until the first loss."""
        self._losses = 0

    def __enter__(self) -> "StepTrace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        first = MICROBATCHES * (STEP - 1)
        if not self._losses:
            self.before.add(frame.f_code)
        if frame.f_code is self.loss and (above := self._above(frame)) is not None:
            if self._losses == first:
                self.between = above
            self._losses += 1
        if first < self._losses <= first + MICROBATCHES:
            self.calls[frame.f_code] += 1

    def _above(self, frame: FrameType) -> list[CodeType] | None:
        found, caller = [], frame.f_back
        while caller is not None and caller.f_code is not self.loop:
            found.append(caller.f_code)
            caller = caller.f_back
        return found[::-1] if caller is not None else None

    @staticmethod
    def files(codes: Iterable[CodeType]) -> dict[str, list[str]]:
        """Functions called by file of ours outside of ELSEWHERE; not what an import runs."""
        found: dict[str, list[str]] = {}
        for code in (code for code in codes if code.co_name != "<module>"):
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] not in ELSEWHERE:
                found.setdefault(str(path.relative_to(PACKAGE)), []).append(code.co_qualname)
        return {name: sorted(found[name]) for name in sorted(found)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The third step of six, of the standard executor in BF16. No line, evaluation or checkpoint is due in it."""
    folder, threads = tmp_path_factory.mktemp("step"), torch.get_num_threads()
    write_text(folder / "text")
    settings = {
        "precision__mode": "bf16_mixed", "train__global_batch_size": 4, "train__micro_batch_size": 2, "train__steps": 6,
        "train__eval_interval": 0, "train__log_interval": 100, "train__sample_tokens": 0, "checkpoint__interval": 0,
    }  # fmt: skip
    try:
        with StepTrace(Run.train.__code__, Decoder.loss.__code__) as found:
            train(tiny(folder, folder / "runs", **settings))
    finally:
        torch.set_num_threads(threads)
    assert found.between
    return found


def test_few_frames_between_the_loop_and_the_loss(trace):
    rows = [f"{Path(code.co_filename).name}: {code.co_qualname}" for code in trace.between]
    assert len(rows) <= MOST_FRAMES, "\n".join([f"{len(rows)} frames, {MOST_FRAMES} at most", *rows])


def test_few_files_in_a_step(trace):
    files = trace.files(trace.calls)
    rows = [f"{name}: {', '.join(functions)}" for name, functions in files.items()]
    assert len(rows) <= MOST_FILES, "\n".join([f"{len(rows)} files, {MOST_FILES} at most", *rows])


def test_few_files_before_the_first_step(trace):
    files = trace.files(trace.before)
    assert "training/session.py" in files
    assert len(files) <= MOST_BEFORE, "\n".join([f"{len(files)} files, {MOST_BEFORE} at most", *files])
