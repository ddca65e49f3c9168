"""One rank fails alone inside a step, where the others wait for it: all end within seconds, and the error names it."""

import time
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import GROUP_S, on_ranks
from tests.training.tiny import rows, tiny
from tilewright.core.errors import TilewrightError
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.parallel.liveness.heartbeat import records
from tilewright.parallel.liveness.rank_failure import RankFailedError
from tilewright.planner.machine import ceilings
from tilewright.training.session import train

pytestmark = pytest.mark.dist
MESHES = {"copies": {"parallel__dp_replicate": 3, "parallel__dp_shard": 1}, "shards": {"parallel__dp_shard": 3}}
VICTIM, STEP, WORLD = 1, 3, 3
SECONDS = GROUP_S / 2
"""For which the others may wait; a timeout of torch's is twice that."""
ERRORS = {"memory": torch.OutOfMemoryError, "bug": RuntimeError}


class Plant:
    """Raises on this rank from its third step on, and says when it did so first."""

    def __init__(self, error):
        self.error, self.steps, self.at = ERRORS[error], 0, None
        before = Decoder.loss

        def loss(model, batch):
            self.steps += model.training
            return before(model, batch)

        Decoder.loss = loss  # this process is the test's own

    def __call__(self, *_):
        if self.steps > 2 * (STEP - 1):  # of two micro-batches each
            self.at = self.at or time.monotonic()
            raise self.error("planted: it fails here")


def _forward(plant):
    before = Decoder.loss

    def loss(model, batch):
        plant()
        return before(model, batch)

    Decoder.loss = loss


def _backward(plant):
    before = Decoder.loss

    def loss(model, batch):
        out = before(model, batch)
        if model.training:
            out.loss_sum.register_hook(plant)
        return out

    Decoder.loss = loss


def _update(plant):
    before = DeepSeekAdam._low_bit

    def low_bit(optimizer, params, grads):
        plant()
        yield from before(optimizer, params, grads)

    DeepSeekAdam._low_bit = low_bit


def _round(plant):
    before = Kernels.newton_schulz

    def newton_schulz(kernels, device_type):
        run = before(kernels, device_type)

        def planted(*args):
            plant()
            return run(*args)

        return planted

    Kernels.newton_schulz = newton_schulz


PLACES = {"forward": _forward, "backward": _backward, "update": _update, "round": _round}


def rank_main(rank, data, runs, changes, place, error):
    """The error that the run of this rank ended with: its class, text, when, and when what was planted was raised."""
    ceilings.measure = fixed_ceilings
    plant = Plant(error) if rank == VICTIM else None
    if plant is not None:
        PLACES[place](plant)
    try:
        train(tiny(Path(data), Path(runs), **changes))
    except (TilewrightError, RuntimeError) as found:
        return type(found).__name__, str(found), time.monotonic(), plant and plant.at
    return None


@pytest.mark.parametrize(
    ("mesh", "place", "error"),
    [
        ("shards", "backward", "bug"), ("copies", "update", "memory"),
        # Each error and mesh is in one of those above, and so is what comes before an exchange and what is between two.
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("shards", "backward", "memory"), ("shards", "update", "memory"), ("copies", "forward", "bug"),
            ("shards", "forward", "memory"), ("shards", "round", "memory"),
        )),
    ],
)  # fmt: skip
@pytest.mark.support("alone", "copies", "shards")
def test_all_end_and_the_rank_is_named(mesh, place, error, data, tmp_path):
    changes = {"optim__moments": "8bit", "optim__kind": "muon" if place == "round" else "adamw"}
    changes |= {"train__global_batch_size": 12, "train__log_interval": 1, "checkpoint__interval": 2}
    found = on_ranks(WORLD, rank_main, str(data), str(tmp_path), MESHES[mesh] | changes, place, error)
    name, text, _, began = found[VICTIM]
    others = [found[rank] for rank in range(WORLD) if rank != VICTIM]
    assert "planted: it fails here" in text
    if error == "memory":
        assert name == "PartialUpdateError"
        assert "none can repeat its part alone" in text
    for kind, said, at, _ in others:
        assert kind == RankFailedError.__name__, said
        phase = {"round": "update"}.get(place, place)
        assert f"Rank {VICTIM} of {WORLD} has failed in step {STEP}, {phase}" in said
        assert "planted: it fails here" in said or "Out of memory on one rank" in said
        assert "\n  need" in said
        assert "\n  try" in said
        assert at - began < SECONDS
    assert {record.follows for record in records(tmp_path / "tiny").values()} == {True, False}
    stops = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "stop"]
    assert [row["rank"] for row in stops] == [VICTIM]
    assert (tmp_path / "tiny" / "checkpoints" / "step_00000002").is_dir()
