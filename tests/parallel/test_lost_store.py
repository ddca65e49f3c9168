"""A launcher other than torchrun: the store is in the first rank's process, and goes with it. What the first rank says
at its end is said by the others too, or in one line that they end with it."""

import os
import socket
import time

import pytest
import torch.distributed as dist

from tests.ranks import started
from tilewright.cli.app import run
from tilewright.cli.commands.chat_models import finetune
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.parallel.launch import launched
from tilewright.parallel.liveness import ending, rendezvous
from tilewright.parallel.liveness.rendezvous import Meeting
from tilewright.parallel.mesh import MeshSizes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _of_a_plain_launcher(rank: int, port: int) -> None:
    """The environment of this process, and a rank 1 that comes a second after what it waits for."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    if rank:
        rendezvous.LOOK_S = 1.0


def _differs(rank, port):
    _of_a_plain_launcher(rank, port)
    try:
        with launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=60, facts={"recipe": str(rank)}):
            pass
    except ConfigError as error:
        return str(error)
    return ""


def _refused_inside(rank, port):
    _of_a_plain_launcher(rank, port)
    try:
        with launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=60) as world:
            assert world.meeting is not None
            world.meeting.gather("what all look at", rank)
            raise ConfigError("No such thing", got="it", need="another", try_="that")
    except ConfigError as error:
        return str(error)


@pytest.mark.dist
@pytest.mark.parametrize("work", [_differs, _refused_inside])
def test_what_is_refused_at_the_start_is_said_by_all_ranks(work):
    """The first one, which has the store, ends when the others have read what it told them."""
    with started(2, work, free_port(), group=False) as (ranks, ends):
        said = []
        for end, process in zip(ends, ranks, strict=True):
            assert end.poll(60)
            said.append(end.recv())
            process.join(60)  # as a command that ends
    assert [failed for failed, _ in said] == [False, False], said[1]
    assert said[0] == said[1]


def _dies(rank, port):
    _of_a_plain_launcher(rank, port)
    meeting = rendezvous.meet(env.ranks(), 60)
    meeting.gather("all are here", rank)
    if rank:
        time.sleep(1)
        assert ending.is_lost_store(_error_of(lambda: meeting.after_first("what never comes")))
        assert not ending.is_lost_store(RuntimeError("of this rank"))
        return True
    os._exit(1)


def _error_of(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


@pytest.mark.dist
def test_the_error_of_a_store_that_is_gone_is_known():
    with started(2, _dies, free_port(), group=False) as (_, ends):
        assert ends[1].poll(60)
        failed, value = ends[1].recv()
        assert not failed, value


@pytest.fixture
def second_of_two(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


WAITS = {
    "asked": lambda meeting: meeting.after_first("the run folder"),
    "told": lambda meeting: meeting.gather("versions", "1"),
    "a group": lambda meeting: dist.init_process_group("gloo", store=meeting.store, rank=1, world_size=2),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_command_whose_first_rank_is_gone_ends_with_one_line(wait, second_of_two, monkeypatch, capsys):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, 2, 20)
    del server
    monkeypatch.setattr(finetune, "gc_paused", lambda: WAITS[wait](meeting))
    assert run(["finetune", "model", "rows.jsonl"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1 of 2 ends since rank 0 did: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_speak_for_themselves_where_torchruns_store_is_gone(rank, second_of_two, monkeypatch):
    """That of the first machine, which ends with its ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(ending, "_store", lambda: store)
    assert ending.prints("the error")
    assert ending.others_failed() == []


@pytest.mark.parametrize("failed", [[0], [2], [0, 2], []])
def test_a_rank_asks_which_others_end_too(failed, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**said, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for rank in [*failed, 1]:  # its own error is none of another's
        dist.PrefixStore("tilewright/end/0", store).set(str(rank), "an error")
    assert ending.others_failed() == failed
