"""Work that a thread does again and again beside a run, and whether the process does any other."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

import psutil


class Repeat:
    """Calls a function in a thread, from one interval after now until `stop`; a context manager. The thread is a
    daemon: a process that is ended does not wait for it.

    Args:
        work: what is called.
        every_s: between the end of one call and the next.
        name: of the thread.
    """

    class Thread(threading.Thread):
        """The thread of one `Repeat`: the processor time that it uses is no sign that the process does something
        else."""

    def __init__(self, work: Callable[[], None], every_s: float, name: str) -> None:
        self._work, self._every_s = work, every_s
        self._stop = threading.Event()
        self._thread = self.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop repeated work: the thread ends after the call that runs."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "Repeat":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._work()


LEAST_SHARE = 0.02
"""Of one processor: with less a process does nothing."""
LEAST_BYTES_PER_S = 64 << 10


class WorkMeter:
    """Meter of a process's work: processor time and bytes of files since the last look, of its threads and child
    processes.

    A rank that prepares data or loads a model for an hour is told from one that hangs by it. Threads that only watch
    (the heartbeat, those that read the others') are left out. A process in an endless loop looks like one that works.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before: tuple[float, float, int] | None = None

    def has_worked(self) -> bool:
        """True if the metered process has worked since the last call; True at the first call."""
        now, (cpu_s, size) = time.monotonic(), self._used()
        before, self._before = self._before, (now, cpu_s, size)
        if before is None:
            return True
        seconds = max(now - before[0], 1e-3)
        return cpu_s - before[1] >= LEAST_SHARE * seconds or size - before[2] >= LEAST_BYTES_PER_S * seconds

    def _used(self) -> tuple[float, int]:
        """Sum the work of a process's living threads and children: processor seconds, and bytes from and to disks."""
        cpu_s, size = self._own_cpu_s(), _bytes(self._process)
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = child.cpu_times()
                cpu_s += times.user + times.system
                size += _bytes(child)
        return cpu_s, size

    def _own_cpu_s(self) -> float:
        watching = {thread.native_id for thread in threading.enumerate() if isinstance(thread, Repeat.Thread)}
        try:
            threads = self._process.threads()
        except psutil.AccessDenied:  # macOS: the watching threads count too, some milliseconds a second
            return time.process_time()
        return sum(thread.user_time + thread.system_time for thread in threads if thread.id not in watching)


def _bytes(process: psutil.Process) -> int:
    if not hasattr(process, "io_counters"):  # macOS
        return 0
    with contextlib.suppress(psutil.AccessDenied):
        counters = process.io_counters()
        return counters.read_bytes + counters.write_bytes
    return 0
