"""Stream and policy are killed 200 times and go on at other world sizes: the same samples and weights, bit by bit."""

import json
import math

import numpy as np
import pytest

from tests.cover import some
from tests.data.test_stream import make, steps
from tilewright.data.common.hashing import hash64
from tilewright.data.mixing.learned_weights import Aioli, Exp3
from tilewright.data.mixing.loss_guard import PplGuard
from tilewright.data.mixing.mixer import Mixer
from tilewright.data.mixing.mixing_policy import DomainSeen, MixEvaluation, shares
from tilewright.data.mixing.weight_limits import MixLimits

KILLS, INTERVAL, SAVED = 200, 4, 3
BASE = {"x": 40.0, "y": 90.0, "z": 7.0}
POLICIES = {
    "ppl_guard": lambda: PplGuard(BASE, patience=2, noise=0.3, cooldown=1, calm=3),
    "exp3": lambda: Exp3(list(BASE), 0.8),
    "aioli": lambda: Aioli(BASE, BASE, hold=2, rate=1.0),
}


def loss(step, place, count):
    """Falls with what was trained on, and is noisy; the same whenever it is asked for."""
    noise = float(hash64(step, place)[0] % np.uint64(1000)) / 1000
    return 4 - 0.2 * math.log1p(count) + 0.3 * noise


class Process:
    """Streams of all ranks, and a mixer on each, as one run has them."""

    def __init__(self, policy, world, log, state=None):
        self.streams = [make(world, rank, batch_size=30, prefetch=0) for rank in range(world)]
        self.mixers = [Mixer(POLICIES[policy](), MixLimits(0.02, 0.9)) for _ in range(world)]
        self.weights, self.step = shares(BASE), 0
        if state is not None:
            saved = json.loads(state)
            self.weights, self.step = saved["weights"], saved["step"]
            for stream, mixer in zip(self.streams, self.mixers, strict=True):
                stream.load_state_dict(saved["stream"])
                assert mixer.load_state_dict(saved["mixer"]) is None
        assert self.streams[0].keep_log(log) == (None, [])

    def saved(self):
        parts = {"stream": self.streams[0].state_dict(), "mixer": self.mixers[0].state_dict()}
        return json.dumps({"weights": self.weights, "step": self.step, **parts})

    def take(self):
        """A step: its samples, and the weights after it."""
        found = steps(self.streams, 1)
        self.step += 1
        if self.step % INTERVAL == 0:
            told = []
            for stream, mixer in zip(self.streams, self.mixers, strict=True):
                counts = enumerate(stream.num_samples.items())
                seen = {
                    name: DomainSeen(x := loss(self.step, i, n), x - 0.1, n / BASE[name]) for i, (name, n) in counts
                }
                told.append(mixer.decide(MixEvaluation(self.step, 9999, self.weights, seen)))
                if told[-1].weights is not None:
                    stream.move(told[-1].weights, told[-1].why)
            assert all(one == told[0] for one in told), "ranks that decide otherwise"
            self.weights = told[0].weights or self.weights
        return found, dict(self.weights)


@pytest.mark.parametrize("policy", some(POLICIES, "exp3"))
def test_two_hundred_kills_change_no_sample_and_no_weight(policy, tmp_path):
    """A kill loses up to two steps behind the last checkpoint and their moves; another number of ranks goes on."""
    log, expected = tmp_path / "mixture.jsonl", {}
    straight = Process(policy, 1, tmp_path / "straight.jsonl")
    killed, state, sizes = Process(policy, 1, log), None, []
    for number in range(KILLS):
        for _ in range(np.random.randint(1, 6)):
            while straight.step <= killed.step:
                here = straight.step
                expected[here] = straight.take()
            at = killed.step
            assert killed.take() == expected[at], f"step {at} after {number} kills"
            if killed.step % SAVED == 0:
                state = killed.saved()
                sizes.append(len(json.dumps(killed.streams[0].state_dict())))
        killed = Process(policy, (1, 2, 3, 5)[np.random.randint(0, 4)], log, state)
    assert killed.step > 100
    assert len({tuple(weights.values()) for _, weights in expected.values()}) > 3, "nothing moved"
    assert max(sizes) < 700
    while killed.step < straight.step:
        killed.take()
    assert log.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
