"""What moving weights of domains costs, and what the rule of `ppl_guard` answers: processor seconds, bytes, counts.

python -m benchmarks.data.mixing_costs

Policies: seconds of a decision for 8 domains, and of the sums of losses that a step adds. State: bytes after 10,000
moves, and seconds until a new stream has loaded it and made a step, there and at ten places of 10 million samples.
`ppl_guard`: simulated losses of 8 domains with normal noise that is alike from one evaluation to the next by some
share; how many of 10,000 evaluations move on flat noise, and after how many a planted shift of one domain is answered.
Seconds are of one processor, so other programs count little.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.common import spread, write_result
from tilewright.data.batches.mix import Picks
from tilewright.data.batches.stream import Stream
from tilewright.data.mixing.base import DomainSeen, MixEvaluation, MixPolicy, shares
from tilewright.data.mixing.domain_sums import DomainSums
from tilewright.data.mixing.guard import PplGuard
from tilewright.data.mixing.learned import Aioli, Exp3
from tilewright.data.mixing.limits import MixLimits
from tilewright.data.mixing.mixer import Mixer

CLAIM = (
    "state of at most 1 KB after 10,000 moves, resumed within 1 s anywhere in 10 million samples; on flat noise at "
    "most 1 % of evaluations move, and a planted shift is answered within 3"
)
DOMAINS = tuple(f"domain{number}" for number in range(8))
BASE = dict.fromkeys(DOMAINS, 1.0)
MOVES, SAMPLES, EVALUATIONS, SIGMA = 10_000, 10_000_000, 10_000, 0.01
POLICIES = {"ppl_guard": lambda: PplGuard(BASE), "exp3": lambda: Exp3(list(BASE)), "aioli": lambda: Aioli(BASE, BASE)}


class Rows:
    """Rows of 8 domains that take no time to make."""

    fingerprint = "0" * 16
    num_rows: Mapping[str, int] = {name: 40_000 + 7_001 * number for number, name in enumerate(DOMAINS)}

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        return {"labels": picks.row[:, None]}

    def blank_row(self) -> dict[str, np.ndarray]:
        return {"labels": np.full((1, 1), -100)}

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        return []


def stream() -> Stream:
    """Steps of 64 rows."""
    return Stream(Rows(), seed=1, batch_size=64, micro_batch_size=64, prefetch=0)


def noise(alike: float, draw: random.Random) -> Iterator[float]:
    """Normal, of standard deviation SIGMA, each like the one before by this share."""
    value = draw.gauss(0, SIGMA)
    while True:
        yield value
        value = alike * value + draw.gauss(0, SIGMA * (1 - alike**2) ** 0.5)


def shown(step: int, losses: Mapping[str, float], trained: Mapping[str, float]) -> MixEvaluation:
    """Of the first epoch, with weights as they began."""
    domains = {name: DomainSeen(loss, trained[name], 0.2) for name, loss in losses.items()}
    return MixEvaluation(step, EVALUATIONS, shares(BASE), domains)


def decision_seconds(policy: MixPolicy) -> dict[str, Any]:
    """Of one evaluation of a mixer, in five parts of 2,000."""
    mixer, found = Mixer(policy, MixLimits(0.01, 0.5)), []
    lines = {name: noise(0.5, random.Random(number)) for number, name in enumerate(DOMAINS)}
    evaluations = [shown(t, seen := {n: 3 + next(one) for n, one in lines.items()}, seen) for t in range(EVALUATIONS)]
    for part in range(5):
        began = time.process_time()
        for one in evaluations[part::5]:
            mixer.decide(one)
        found.append((time.process_time() - began) / len(evaluations[part::5]))
    return spread(found) | {"state_bytes": len(json.dumps(mixer.state_dict()))}


def sums_seconds() -> dict[str, Any]:
    """Of adding the rows of a step."""
    sums, domain, found = DomainSums(DOMAINS), np.arange(64) % 8, []
    losses, targets = np.random.default_rng(0).random(64, np.float32) * 500, np.full(64, 256)
    for _ in range(5):
        began = time.process_time()
        for _ in range(1000):
            sums.add(domain, losses, targets)
        found.append((time.process_time() - began) / 1000)
    return spread(found)


def state() -> dict[str, Any]:
    """Bytes and seconds after many moves, and far into the data."""
    one, draw, sizes = stream(), random.Random(3), []
    for number in range(MOVES):
        one.next_step()
        one.move({name: draw.uniform(0.1, 1) for name in DOMAINS}, "test")
        if number % 500 == 499:
            sizes.append(len(json.dumps(one.state_dict())))
    resumed = []
    for sample in [one.state_dict()["next_sample"], *(SAMPLES * tenth // 10 for tenth in range(1, 11))]:
        given = json.loads(json.dumps(one.state_dict() | {"next_sample": sample, "step": sample // 64}))
        began = time.process_time()
        other = stream()
        other.load_state_dict(given)
        other.next_step()
        resumed.append(time.process_time() - began)
    return {"bytes": max(sizes), "after_first_500_moves_bytes": sizes[0], "moves": MOVES, "resume_s": spread(resumed)}


def moved_on_noise(alike: float) -> float:
    """Share of evaluations that move or refuse, of all domains together."""
    guard, found = PplGuard(BASE), 0
    lines = {name: noise(alike, random.Random(f"{name} {alike}")) for name in DOMAINS}
    for t in range(EVALUATIONS):
        told = guard.decide(shown(t, {n: 3 + next(one) for n, one in lines.items()}, dict.fromkeys(DOMAINS, 3.0)))
        found += told.weights is not None or bool(told.refused)
    return found / EVALUATIONS


def answered_after(kind: str, alike: float, at: int) -> int:
    """Evaluations from a shift of the last domain, by ten deviations at once or six at each one, to its first move."""
    guard, shifted = PplGuard(BASE), DOMAINS[-1]
    lines = {name: noise(alike, random.Random(f"{name} {alike} {at}")) for name in DOMAINS}
    for t in range(at + 12):
        shift = 0.0 if t < at else SIGMA * (10 if kind == "jump" else 6 * (t - at + 1))
        seen = {n: 3 + next(one) + shift * (n == shifted) for n, one in lines.items()}
        trained = dict.fromkeys(DOMAINS, 3.0) | {shifted: 3 + shift}
        told = guard.decide(shown(t, seen, trained))
        if t >= at and told.weights is not None and f"{shifted}: held-out loss rose" in told.why:
            return t - at + 1
    return 99


def answers() -> dict[str, Any]:
    """Of shifts at forty places."""
    found = {}
    for kind in ("jump", "climb"):
        for alike in (0.0, 0.9):
            after = [answered_after(kind, alike, at) for at in range(24, 184, 4)]
            within = sum(number <= 3 for number in after)
            found[f"{kind}, alike by {alike}"] = {
                "shifts": len(after),
                "median": statistics.median(after),
                "within_3": within,
                "never_in_12": after.count(99),
            }
    return found


def main() -> None:
    """Measure, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = {
        "unit": "processor seconds",
        "domains": len(DOMAINS),
        "decision_s": {name: decision_seconds(make()) for name, make in POLICIES.items()},
        "sums_of_a_step_s": sums_seconds(),
        "stream_state": state(),
        "share_moved_on_flat_noise": {f"alike by {alike}": moved_on_noise(alike) for alike in (0.0, 0.5, 0.9, 0.97)},
        "planted_shift_answered_after": answers(),
    }
    print(json.dumps(results, indent=1))
    write_result("mixing_costs", CLAIM, results)


if __name__ == "__main__":
    main()
