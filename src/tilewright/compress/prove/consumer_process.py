"""The parent's side of a proof: a consumer in a process of its own, under limits of time and memory.

A consumer that dies, hangs or takes all memory is a `ConsumerOutcome` with the reason, never an exception here. Memory
is watched, not limited by the kernel: a limit of address space would stop runtimes that reserve far more than they use.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from tilewright.compress.prove.consumer_session import ConsumerAnswer, Request
from tilewright.core import env
from tilewright.core.units import format_bytes, format_seconds

_POLL_S = 0.02
_LAST_LINES = 4
_LINE = 300


@dataclass(frozen=True)
class ConsumerLimits:
    """Limits of one consumer. `memory_bytes` is resident memory of the process and its children."""

    seconds: float
    memory_bytes: int

    @classmethod
    def of_this_machine(cls, seconds: float = 600.0) -> "ConsumerLimits":
        """Set the limits of a consumer's process from this machine: two thirds of the memory that is free now."""
        return cls(seconds, psutil.virtual_memory().available * 2 // 3)


@dataclass(frozen=True)
class ConsumerOutcome:
    """The outcome of one consumer. Without an answer `reason` says why.

    Args:
        answer: None where the consumer failed.
        reason: of the failure, with the consumer's last lines.
        logits_NV: log-probabilities or logits, in the order of the question's positions.
        token_ids: "plain" of the question's texts, "special" of some of them with begin and end; None where the
            artefact holds no tokenizer.
    """

    answer: ConsumerAnswer | None
    reason: str = ""
    logits_NV: np.ndarray | None = None
    token_ids: dict[str, list[list[int]]] | None = None


def ask(
    module: str, request: Request, limits: ConsumerLimits, on_line: Callable[[str], object] = lambda line: None
) -> ConsumerOutcome:
    """Run a consumer's process to its end.

    Args:
        module: of the script, see `consumer_session`.
        request: its answer folder exists and is empty; the consumer's output stays there as `consumer.log`.
        limits: the process and its children are killed when one is exceeded.
        on_line: called with each new last line that the consumer prints.
    """
    folder = Path(request.answer)
    (folder / "request.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    log = folder / "consumer.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(folder / "request.json")],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env.of_consumer(Path(__file__).parents[3], request.threads),
            start_new_session=True,
        )
    try:
        trouble = _watch(child, limits, log, on_line)
    finally:
        _kill(child)
    if trouble is None and child.returncode:
        trouble = _exit_words(child.returncode)
    if trouble is None and not (folder / "answer.json").is_file():
        trouble = "ended without an answer"
    if trouble is not None:
        return ConsumerOutcome(None, _with_log(trouble, log))
    return _read(folder)


def _watch(
    child: "subprocess.Popen[bytes]", limits: ConsumerLimits, log: Path, on_line: Callable[[str], object]
) -> str | None:
    """Watch a consumer's process until its end; which limit was exceeded, or None."""
    started, shown = time.monotonic(), ""
    while child.poll() is None:
        used = _resident(child.pid)
        if used > limits.memory_bytes:
            return f"stopped at {format_bytes(used)} of memory, the limit is {format_bytes(limits.memory_bytes)}"
        if time.monotonic() - started > limits.seconds:
            return f"stopped: no answer within {format_seconds(limits.seconds)}"
        last = (_tail(log) or [""])[-1]
        if last != shown:
            on_line(last)
            shown = last
        time.sleep(_POLL_S)
    return None


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:  # it ends while it is looked at
        pass
    return total


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill a consumer's process and its whole session: a runtime may have started processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _exit_words(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name} (signal {-code})"
    return f"exit code {code}"


def _tail(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line.strip()[:_LINE] for line in lines if line.strip()]


def _with_log(trouble: str, log: Path) -> str:
    return "; ".join([trouble, *_tail(log)[-_LAST_LINES:]])


def _read(folder: Path) -> ConsumerOutcome:
    answer = ConsumerAnswer(**json.loads((folder / "answer.json").read_text(encoding="utf-8")))
    ids = folder / "token_ids.json"
    return ConsumerOutcome(
        answer,
        logits_NV=np.load(folder / "logits.npy", allow_pickle=False),
        token_ids=json.loads(ids.read_text(encoding="utf-8")) if ids.is_file() else None,
    )
