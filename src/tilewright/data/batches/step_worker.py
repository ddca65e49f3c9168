"""A thread that builds steps ahead into a bounded queue, and hands on what goes wrong in it."""

import queue
import threading
from collections.abc import Callable

from tilewright.data.batches.step_samples import BuiltStep


class StepWorker:
    """Builds steps ahead in a thread, into a bounded queue.

    Args:
        build: makes the step whose first sample it is given.
        start: the first step's.
        depth: steps that are ready at most.
    """

    def __init__(self, build: Callable[[int], BuiltStep], start: int, depth: int) -> None:
        self._queue: queue.Queue[tuple[BuiltStep | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(build, start), name="tilewright-data", daemon=True)
        self._thread.start()

    def get(self) -> BuiltStep:
        """The next step from the worker; raises what its build raised."""
        built: BuiltStep | None = None
        if self._error is None:
            built, self._error = self._queue.get()
        if self._error is not None:
            raise self._error
        assert built is not None
        return built

    def close(self) -> None:
        """Close the worker: end the thread; the steps that it has made are thrown away."""
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may be before a full queue
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, build: Callable[[int], BuiltStep], start: int) -> None:
        while not self._stop.is_set():
            try:
                built = build(start)
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                self._queue.put((None, error))
                return
            self._queue.put((built, None))
            start = built.end
