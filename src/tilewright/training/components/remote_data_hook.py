"""Data at addresses in a run: a source that is away is left out by all ranks, and taken in again when it answers.

What one rank cannot read, all leave out, from the same sample on: by a move in the stream's log. Until then its rows
are blank: they have no targets. A shard that cannot be used is said once, with its rows.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.data.batches.stream import Stream
from tilewright.data.dataset.remote.prepared_shards import PreparedShards
from tilewright.parallel.agree import reduced_on, sum_over
from tilewright.parallel.world import World
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook


class FarHook(StepHook):
    """Leaves a source that is away out on all ranks, and takes it in again when it answers.

    Args:
        prepared: reads shards.
        stream: leaves domains out.
        world: of the run.
        device: of the run.
    """

    def __init__(self, prepared: PreparedShards, stream: Stream, world: World, device: torch.device) -> None:
        self.prepared, self.stream, self.world, self.device = prepared, stream, world, device
        self._said: set[int] = set()
        self._resumed = False

    def after_step(self, step: Step, result: StepResult) -> None:
        """Leave out data at far addresses that is away, and say what was set aside."""
        reader = self.prepared.reader
        # 1. Sources that were away at the checkpoint are tried again in the background, not waited for.
        if not self._resumed:
            for name in self.stream.away:
                reader.suspect(name, "it was away when this checkpoint was written")
            self._resumed = True
        # 2. Shards that were set aside, once each.
        for place, why in list(reader.set_aside.items()):
            if place not in self._said:
                self._said.add(place)
                shard, rows = reader.shards[place], self.prepared.rows_of_shard(place)
                text = f"{shard.file} of {shard.domain} is set aside: {why}; its {rows} rows are blank"
                step.recorder.event(step.number, "shard_set_aside", text, rows=rows, shard=shard.file)
        # 3. What one rank cannot read all leave out: this is a collective, so all ranks call it at each step.
        here = reader.away
        away = self._of_all(here)
        if set(away) == set(self.stream.away):
            return
        for name in away:
            if name not in self.stream.away:
                why = here.get(name, "another process cannot read it")
                start = self.stream.leave_away([*self.stream.away, name], f"the source of {name} is away")
                text = f"the source of {name} is away ({why}): the others go on without it from sample {start} on"
                step.recorder.event(step.number, "source_away", text, domain=name, first_sample=start)
        # 4. A source is back when no rank misses it.
        for name in [name for name in self.stream.away if name not in away]:
            left = [one for one in self.stream.away if one != name]
            start = self.stream.leave_away(left, f"the source of {name} has returned")
            blank = self.prepared.blank_rows.get(name, 0)
            text = f"the source of {name} has returned: it is mixed in from sample {start} on; {blank} rows were blank"
            step.recorder.event(step.number, "source_back", text, domain=name, first_sample=start, blank_rows=blank)

    def _of_all(self, here: Mapping[str, str]) -> list[str]:
        """Domains of data at far addresses that are away for any rank."""
        flags_D = torch.tensor([name in here for name in self.stream.domains], dtype=torch.int64)
        group = self.world.data.handle
        if group is not None:
            flags_D = flags_D.to(reduced_on(group, self.device))
            sum_over(group, [flags_D])
        return [name for name, flag in zip(self.stream.domains, flags_D.tolist(), strict=True) if flag]

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, Any]:
        """Bytes that this process has fetched from far addresses, and rows that came blank."""
        counts = self.prepared.reader.counts
        blank = sum(self.prepared.blank_rows.values())
        found = {"fetched_bytes": counts.fetched_bytes, "fetch_s": counts.fetch_s}
        return found | ({"blank_rows": blank} if blank else {})
