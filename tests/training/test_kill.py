"""A real process, killed for real: what comes out at the end is what would have come out anyway."""

import random
import signal
import time

import pytest

from tests.commands import Command
from tests.training.tiny import assert_same_run, rows, settings, tiny
from tilewright.training.session import train

STEPS = 30
CHANGES = {"train__steps": STEPS, "checkpoint__interval": 2, "train__eval_interval": 10, "train__sample_tokens": 0}
COMPILED = CHANGES | {"ops__adam": "auto"}
"""With the kernel of users' runs."""


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    runs = tmp_path_factory.mktemp("straight")
    train(tiny(data, runs, **COMPILED))
    return runs / "tiny"


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """With torch's own operations: each process that compiles takes seconds more."""
    runs = tmp_path_factory.mktemp("plain")
    train(tiny(data, runs, **CHANGES))
    return runs / "tiny"


def _start(data, runs, **changes) -> Command:
    """`tilewright train` in a process of its own."""
    wanted = settings(data, runs, **CHANGES | {"log__report": "false"} | changes)
    options = [f"--{name}={value}" for name, value in wanted.items()]
    recipe = data / "empty.toml"
    recipe.write_text("")  # the schema's defaults, as in `tiny`
    return Command(["train", str(recipe), *options])


def _last_step(runs) -> int:
    metrics = runs / "tiny" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    return lines[-1].count(b'"step"') and int(lines[-1].split(b":")[1].split(b",")[0]) if lines else 0


def _wait_for_step(process: Command, runs, step: int) -> None:
    """Until the run has passed `step` (or ended)."""
    deadline = time.monotonic() + 120
    while _last_step(runs) < step and process.poll() is None:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.01)  # a step takes as long; looking more often takes the processor from it


def _kill(data, runs, step: int, after_s: float, number: int = signal.SIGKILL, **changes) -> tuple[int, str]:
    process = _start(data, runs, **changes)
    _wait_for_step(process, runs, step)
    time.sleep(after_s)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def _kill_and_compare(data, runs, straight, kills: int, seed: int, **changes) -> None:
    print(f"{seed = }")
    draw = random.Random(seed)
    step = 0
    for _ in range(kills):
        step += draw.randint(1, 2 * STEPS // (kills + 1) - 1)
        code, said = _kill(data, runs, min(step, STEPS - 2), draw.uniform(0, 0.03), **COMPILED | changes)
        assert code in (-signal.SIGKILL, 0), said
    train(tiny(data, runs, **COMPILED | changes))
    assert_same_run(runs / "tiny", straight)
    events = rows(runs / "tiny" / "events.jsonl")
    recovered = [row["recovery_s"] for row in events if row["kind"] == "recovered"]
    assert all(seconds < 60 for seconds in recovered)


@pytest.mark.slow
@pytest.mark.support("kill", "one")
def test_killed_twice_at_random_moments(data, tmp_path, straight):
    _kill_and_compare(data, tmp_path, straight, kills=2, seed=random.getrandbits(32))


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_with_checkpoints_by_time(data, tmp_path, plain, kills):
    """The moments of the checkpoints differ from run to run; the weights do not."""
    seed = random.getrandbits(32)
    minutes = {"checkpoint__interval": 0, "checkpoint__interval_minutes": 0.001, "ops__adam": "ref"}
    _kill_and_compare(data, tmp_path, plain, kills=kills, seed=seed, **minutes)


@pytest.mark.slow
def test_killed_on_whole_documents(data, tmp_path):
    """Steps have other numbers of documents each; where the stream stands is known to the document."""
    whole = {"data__rows": "documents", "data__seq_len": 64, "ops__adam": "ref"}
    train(tiny(data, tmp_path / "straight", **CHANGES | whole))
    _kill_and_compare(data, tmp_path, tmp_path / "straight" / "tiny", kills=1, seed=random.getrandbits(32), **whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_six_times_at_random_moments(data, tmp_path, straight, seed):
    _kill_and_compare(data, tmp_path, straight, kills=6, seed=seed)


@pytest.mark.support("signal", "one")
@pytest.mark.slow
def test_sigterm_saves_and_exits_with_0(data, tmp_path, straight):
    code, said = _kill(data, tmp_path, 7, 0.0, signal.SIGTERM, **COMPILED)
    assert code == 0, said
    assert "SIGTERM" in said
    assert "the same command continues from there" in said
    train(tiny(data, tmp_path, **COMPILED))
    assert "recovered" in [row["kind"] for row in rows(tmp_path / "tiny" / "events.jsonl")]
    assert_same_run(tmp_path / "tiny", straight)
