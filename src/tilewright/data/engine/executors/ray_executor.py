"""The executor of a build on Ray: each unit is a task with one processor, on a cluster or, where none is named, on a
Ray of this machine.

Ray retries nothing: a unit whose process or node is gone comes back, and is tried alone as with local processes. The
files are read and written where they are, so every node must see them; that is checked before the first unit.
"""

import importlib.util
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright import __version__
from tilewright.core import env
from tilewright.core.errors import DataError, HardwareError
from tilewright.core.log import get_logger
from tilewright.data.engine.build_context import WORK, Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.executors.build_executor import Done, Unit
from tilewright.data.engine.executors.killable_workers import PooledExecutor
from tilewright.data.stages.scores import score_settings as scores

log = get_logger(__name__)

_STORE_BYTES = 128 << 20  # tasks hand on files, not objects; by default Ray takes 30 % of the memory for those
_KNOCK_S = 10.0
_WAIT_S = 300.0  # for a node to say what it sees: under load, its first process starts slowly


class RayExecutor(PooledExecutor):
    """Executor of a data build in tasks of Ray. A context manager, which ends a Ray that it started and no other.

    Args:
        address: of a cluster; "": Ray is started on this machine.
        processes: tasks at a time on this machine. Not read where `address` is given: a cluster has its own number.

    Raises:
        HardwareError: Ray is not installed.
    """

    def __init__(self, address: str, processes: int):
        super().__init__()
        if importlib.util.find_spec("ray") is None:
            raise HardwareError(
                "Executor `ray` needs the package ray",
                got="no module named ray",
                need="the extra `ray`",
                try_="pip install 'tilewright[ray]', or --executor local",
            )
        self._address, self._processes = address, processes
        self._ray: Any = None
        self._is_mine = self._is_local = False
        """Whether it was started or connected here, and whether its processes have the variables of this one."""
        self._seen: Context | None = None
        """The build whose files all nodes see."""

    @cached_property
    def killed(self) -> tuple[type[BaseException], ...]:
        """Errors of Ray that say that a process was killed; see `PooledExecutor`: a process that died or was killed for
        memory, or a node that is gone."""
        from ray import exceptions

        return exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError

    def run(self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done) -> None:
        """Run the units of a stage on Ray: see `UnitExecutor`. Ray is started when there is a unit to run.

        Raises:
            DataError: a node does not see the files, or has another tilewright.
            HardwareError: no connection to the cluster, or a process was killed while it made a unit alone, and by no
                file of the user.
        """
        if not todo:
            return
        self.start()
        if context is not self._seen:
            self._look_around(context)
            self._seen = context
        super().run(context, stage, todo, advance)

    def pool_of(self, num: int | None) -> Executor:
        """A pool of processes on Ray: see `PooledExecutor`. One task at a time has what the cluster has; `num` is the
        number of tasks given."""
        return RayPool(self._ray, None if self._is_local else {"env_vars": dict(env.ONE_THREAD)})

    def start(self) -> None:
        """Connect to the Ray cluster or start Ray, where that has not been done.

        Raises:
            HardwareError: that is not possible.
        """
        if self._ray is not None:
            return
        _knock(self._address)
        with env.starting_ray():
            import ray

            if not ray.is_initialized():
                options = {"num_cpus": self._processes, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
                where: dict[str, Any] = {"address": self._address} if self._address else {"address": "local"} | options
                where |= {"log_to_driver": False, "logging_level": "ERROR"}
                on_term = signal.getsignal(signal.SIGTERM)
                try:
                    ray.init(**where)
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise _cannot_start(self._address, error) from error
                signal.signal(signal.SIGTERM, on_term)  # Ray puts its own in the place
                self._is_mine, self._is_local = True, not self._address
        self._ray = ray

    def _look_around(self, context: Context) -> None:
        """Look around on Ray: let each node say if it sees the folder of the build and its sources.

        Raises:
            DataError: one does not, or runs another tilewright.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        paths = _paths(context)
        token, marker = secrets.token_hex(8), context.out.absolute() / WORK / "seen-by-all-nodes"
        marker.write_text(token)
        try:
            task = ray.remote(num_cpus=0, max_retries=0)(look)
            asked = {}
            for node in ray.nodes():
                if node["Alive"] and node["Resources"].get("CPU"):
                    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"
                    asked[name] = task.options(scheduling_strategy=here).remote(str(marker), paths)
            answers = {}
            for name, answer in asked.items():
                try:
                    answers[name] = ray.get(answer, timeout=_WAIT_S)
                except ray.exceptions.RayError as error:
                    answers[name] = {"error": str(error).strip().rpartition("\n")[2]}
        finally:
            marker.unlink(missing_ok=True)
        check_nodes(answers, token, context.out)
        log.info("Ray: %d nodes see the files, %s processors", len(answers), ray.cluster_resources().get("CPU", 0))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        super().__exit__(kind, error, trace)
        if self._is_mine:
            self._ray.shutdown()
            self._is_mine = False
        self._ray = None


class RayPool(Executor):
    """Ray as a pool of processes; it decides how many there are.

    Args:
        ray: the module, connected.
        runtime: environment of the processes, for those that do not have it yet.
    """

    def __init__(self, ray: Any, runtime: Mapping[str, Any] | None = None):
        self.ray, self.runtime = ray, runtime
        self._tasks: dict[Callable[..., object], Any] = {}
        self._refs: dict[Any, Future] = {}

    def submit(self, work: Callable[..., object], /, *args: object) -> Future:  # type: ignore[override]
        """Submit a job to Ray that fails with the error of `work`, or with an error of Ray if that did not come to its
        end."""
        if work not in self._tasks:
            self._tasks[work] = self.ray.remote(num_cpus=1, max_retries=0, runtime_env=self.runtime)(work)
        job: Future = Future()
        ref = self._tasks[work].remote(*args)
        self._refs[ref] = job

        def finish(told: Future) -> None:
            error: Any = told.exception()
            if isinstance(error, self.ray.exceptions.RayTaskError):
                error = error.cause  # without Ray's account of it
            job.set_result(told.result()) if error is None else job.set_exception(error)

        ref.future().add_done_callback(finish)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut a pool on Ray down: forget the jobs; `cancel_futures`: those that have not ended are stopped, since they
        publish nothing."""
        for ref, job in self._refs.items():
            if cancel_futures and not job.done():
                self.ray.cancel(ref, force=True)
        self._refs.clear()


def _paths(context: Context) -> list[str]:
    """Paths to look for on Ray's nodes: a file of each domain, filters with their files, and what scores and tokens are
    learned from."""
    build = context.build
    files = {items[0].domain: items[0].path for items in context.listing.shards if items[0].path}
    learned = scores.paths(build.quality, build.noise, build.sample).values()
    own = [path for of_filter in build.filters.files.values() for path in of_filter.values()]
    own += [use.rpartition(":")[0] for use in build.filters.use.values() if ".py:" in use]
    return [*files.values(), *learned, *own, *filter(None, [build.tokenizer.path])]


def look(marker: str, paths: Sequence[str]) -> dict[str, Any]:
    """Look around on a node of Ray: its version of tilewright, what it reads in the file `marker`, and which `paths` it
    does not see."""
    file = Path(marker)
    missing = [path for path in paths if not Path(path).exists()]
    return {"version": __version__, "token": file.read_text() if file.is_file() else "", "missing": missing}


def check_nodes(answers: Mapping[str, Mapping[str, Any]], token: str, out: Path) -> None:
    """True if all nodes of Ray can work on the build in `out`.

    Args:
        answers: what `look` said, by node; or its `error`.
        token: what is in the marker.
        out: the folder of the build.

    Raises:
        DataError: one cannot.
    """
    problems = []
    for name, answer in answers.items():
        if "error" in answer:
            problems.append(f"{name}: {answer['error']}")
        elif answer["version"] != __version__:
            problems.append(f"{name}: tilewright {answer['version']}, here {__version__}")
        elif answer["token"] != token:
            problems.append(f"{name}: does not see {out}")
        elif answer["missing"]:
            problems.append(f"{name}: does not see {', '.join(answer['missing'])}")
    if problems or not answers:
        raise DataError(
            "Node of the Ray cluster cannot work on this build",
            where="data build --executor ray",
            got="\n".join(problems) or "a cluster without processors",
            need="nodes with the same tilewright that see the sources and the folder of the build under these paths",
            try_="--out on a file system that all nodes share, or --executor local",
        )


def _knock(address: str) -> None:
    """True if a server of Ray listens at host:port; Ray itself reports only after minutes that none does."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise _cannot_start(address, error) from error


def _cannot_start(address: str, error: Exception) -> HardwareError:
    said = str(error).strip()
    if not address:
        try_ = "--executor local, which needs no Ray"
        return HardwareError("Ray cannot be started on this machine", got=said, need="a Ray that starts", try_=try_)
    return HardwareError(
        "Ray cluster cannot be reached",
        where="environment variable RAY_ADDRESS",
        got=f"{address}: {said}",
        need="a cluster that runs, with the same versions of Ray and Python",
        try_="ray status --address " + address + ", or unset RAY_ADDRESS: Ray is started on this machine then",
    )
