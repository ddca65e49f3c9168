"""Work that a thread does again and again beside a run."""

import threading
from collections.abc import Callable
from types import TracebackType


class Repeat:
    """Calls a function in a thread, from one interval after now until `stop`; a context manager. The thread is a
    daemon: a process that is ended does not wait for it.

    Args:
        work: what is called.
        every_s: between the end of one call and the next.
        name: of the thread.
    """

    class Thread(threading.Thread):
        """Of one of these: what it uses is no sign that the process does something else."""

    def __init__(self, work: Callable[[], None], every_s: float, name: str) -> None:
        self._work, self._every_s = work, every_s
        self._stop = threading.Event()
        self._thread = self.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the call that runs."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "Repeat":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._work()
