"""Tests on several ranks: functions that run once per rank in processes of their own, over gloo.

Processes come from a fork server that has imported torch and all else that takes time, so eight of them start within a
second. A lock lets one such test of a clone run at a time, whatever number of test processes there are: ranks on two
cores wait for each other.
"""

import fcntl
import multiprocessing
import multiprocessing.context
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.disk import not_waited_for
from tests.draws import draw_from
from tests.preparing import prepare_here

PRELOAD = [
    "torch", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "numpy", "pytest", "hypothesis", "transformers.modeling_utils", "tests.ranks",
    "transformers.models.qwen3.modeling_qwen3", "pandas", "tilewright.training.executor.pipeline",
    "tilewright.training.session", "tilewright.cli.app", "torch.utils.serialization",
    *(f"tilewright.ops.backends.cpu.{name}" for name in ("amx", "attention", "low_bit_adam", "wgrad")),
    "tilewright.ops.backends.native.int8", "tests.training.tiny", "tests.frozen",
]  # fmt: skip


GROUP_S = 180.0
"""The timeout of a group of ranks, which a loaded machine passes; what must not take as long is held against it."""
LOCK = Path(__file__).parents[1] / ".pytest_cache" / "ranks.lock"


def on_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: float = 270) -> list[Any]:
    """What `function(rank, *args)` returns on each rank, inside an initialised group of gloo.

    Args:
        world: number of ranks.
        function: of a test module, by name; what it returns is pickled.
        args: the same for all ranks.
        seconds: after which the ranks are killed.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or did not end in time.
    """
    with started(world, function, *args) as (_, ends):
        return _collect(ends, seconds)


def of_one_rank(function: Callable[[], Any]) -> Any:
    """What `function` returns on the first rank, on all of them: the step of one process that all compare with is
    computed once. Called on every rank; what it returns is pickled."""
    import torch.distributed as dist

    found = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Processes of it begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@contextmanager
def started(
    world: int, function: Callable[..., Any], *args: Any, group: bool = True
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """The processes of the ranks, and what each sends at its end: whether `function` raised, and what it returned or
    the traceback. They are killed where they still run at the end. Without `group` they make none, and have the store
    that torchrun would give them."""
    import torch.distributed as dist

    context = fork_server()
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A store of this process and a port that the system picks. `FileStore` can wait for half an hour as it is
        # deleted: the last rank but one removes its file now and then.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world):
                mine, theirs = context.Pipe(duplex=False)
                given = (theirs, store.port, rank, world, function, args, group)
                process = context.Process(target=_rank, args=given, daemon=True)
                process.start()
                theirs.close()
                ends.append(mine)
                processes.append(process)
            yield processes, ends
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(ends: list[Connection], seconds: float) -> list[Any]:
    """Results by rank; the first failure ends the wait."""
    results: dict[int, Any] = {}
    until = time.monotonic() + seconds
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, timeout=max(0.0, until - time.monotonic()))
        missing = [rank for rank in range(len(ends)) if rank not in results]
        assert ready, f"ranks {missing} of {len(ends)} did not end in {seconds:g} s"
        for end in ready:
            rank = ends.index(end)
            try:
                failed, value = end.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(ends)} died") from None
            assert not failed, f"rank {rank} of {len(ends)}:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank(
    end: Connection, port: int, rank: int, world: int, function: Callable[..., Any], args: tuple, group: bool
) -> None:
    import torch
    import torch.distributed as dist

    from tilewright.data import prepare

    torch.set_num_threads(1)
    os.fsync, prepare.call_module = not_waited_for, prepare_here  # this process is the test's own
    draw_from(function.__qualname__)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in local.items()})
    if group:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_S))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        found = False, function(rank, *args)
    except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
        found = True, traceback.format_exc()
    end.send(found)
    end.close()
    if group and not found[0]:
        dist.destroy_process_group()
