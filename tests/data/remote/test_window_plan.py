"""What is read ahead, block by block, while weights move: what comes is there, in the room, and read once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.data.batches.mixture_order import BLOCK, Mixture
from tilewright.data.dataset.remote.shard_windows import WindowedOrder
from tilewright.data.dataset.remote.window_plan import WindowPlan


class Reader:
    """Reads all that the plan wants at once, and keeps nothing that it does not want."""

    def __init__(self, shard_rows, sizes, window, room):
        self.order = WindowedOrder(shard_rows, window)
        ends = np.cumsum([len(rows) for rows in shard_rows.values()]).tolist()
        self.places = [list(range(end - len(rows), end)) for rows, end in zip(shard_rows.values(), ends, strict=True)]
        self.plan, self.sizes = WindowPlan(sizes, self.places, self.order, room), sizes
        self.there, self.bytes = set(), 0

    def follow(self, mixture, sample):
        coming = self.plan.follow(mixture, sample, set(self.there))
        for place in coming or ():
            if place not in self.there:
                self.bytes += self.sizes[place]
        self.there = set(self.plan.all_wanted())

    def least(self, mixture, block):
        """Bytes of the windows of a block's samples."""
        counts = zip(mixture.counts(block * BLOCK), mixture.counts((block + 1) * BLOCK), strict=True)
        windows = [one for d, (a, b) in enumerate(counts) for one in self.plan._windows_between(d, a, b)]
        return sum(self.sizes[place] for place in {place for one in windows for place in self.plan._shards(one)})

    def held(self):
        return sum(self.sizes[place] for place in self.there)


def needed(reader, mixture, sample, stop):
    """Shards of samples, each with its epoch."""
    picks = mixture.picks(np.arange(sample, stop))
    found = set()
    for domain, places in enumerate(reader.places):
        here = picks.domain == domain
        at = np.searchsorted(np.cumsum(reader.order._rows[domain]), picks.row[here], side="right")
        found.update(
            (places[place], epoch) for place, epoch in zip(at.tolist(), picks.epoch[here].tolist(), strict=True)
        )
    return found


def fields(draw):
    """Domains whose shards have so many rows, of a byte each."""
    sizes = draw(st.lists(st.lists(st.integers(30, 90), min_size=3, max_size=30), min_size=2, max_size=4))
    return {f"d{at}": rows for at, rows in enumerate(sizes)}


@settings(max_examples=6, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999), window=st.integers(1, 3), share=st.floats(0.05, 1.2))
def test_what_comes_is_there_and_in_the_room_whatever_the_moves(data, seed, window, share):
    """Weights may fall to nothing, and the sample may jump, as at a resume."""
    rows = fields(data.draw)
    sizes = [size for of in rows.values() for size in of]
    least = sum(sum(sorted(of)[-window:]) for of in rows.values())
    room = max(least, int(share * sum(sizes)))
    reader = Reader(rows, sizes, window, room)
    num_rows = {name: sum(of) for name, of in rows.items()}
    mixture, sample = Mixture(seed, num_rows, order=reader.order), 0
    mixture.add_stage(0, num_rows)
    for _ in range(12):
        block = sample // BLOCK
        move = data.draw(st.sampled_from(["none", "none", "weights", "jump"]))
        if move == "weights":
            weights = data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=len(rows), max_size=len(rows)))
            sample -= data.draw(st.integers(0, sample % BLOCK))  # steps that were made ahead are thrown away
            mixture = Mixture(seed, num_rows, mixture.since(sample), reader.order)
            moved = dict(zip(rows, weights, strict=True)) if any(weights) else num_rows
            mixture.add_stage(-(-sample // BLOCK) * BLOCK, moved)
        elif move == "jump":
            sample += data.draw(st.integers(0, 9 * BLOCK))
            block = sample // BLOCK
        reader.follow(mixture, sample)
        assert {place for place, _ in needed(reader, mixture, sample, (block + 1) * BLOCK)} <= reader.there
        at_once = reader.least(mixture, block) + least  # of the block, and windows that were begun
        assert reader.held() <= max(room, at_once), "only what comes at once may have more"
        sample += data.draw(st.integers(1, 200))


@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999))
def test_moves_read_nothing_twice(data, seed):
    """Weights that move by up to a half each second block, and a room of a tenth or more: what is read is what samples
    need and what is there at the end."""
    rows = {f"d{at}": [60] * data.draw(st.integers(20, 60)) for at in range(3)}
    sizes = [size for of in rows.values() for size in of]
    reader = Reader(rows, sizes, 1, max(4 * BLOCK, sum(sizes) // 10))
    num_rows = {name: sum(of) for name, of in rows.items()}
    mixture, used = Mixture(seed, num_rows, order=reader.order), set()
    mixture.add_stage(0, num_rows)
    for sample in range(0, sum(sizes) - BLOCK, 64):
        reader.follow(mixture, sample)
        used |= needed(reader, mixture, sample, sample + 64)
        if sample % 512 == 448:
            factors = data.draw(st.lists(st.floats(0.7, 1.4), min_size=3, max_size=3))
            mixture = Mixture(seed, num_rows, mixture.since(sample), reader.order)
            moved = {name: size * factor for (name, size), factor in zip(num_rows.items(), factors, strict=True)}
            mixture.add_stage(sample + 64, moved)
    assert reader.bytes <= 60 * len(used) + reader.held()
