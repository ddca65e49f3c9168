"""Tables of torch's schedules made in this process: one of its own imports torch for seconds. `simulate` in
docs/how-to/choose-a-mesh.md starts one, as users do."""

import json
from collections.abc import Sequence

import pytest

from tilewright.planner.simulate import torch_tables as made
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.torch_tables import Asked, torch_tables


def tables_here(asked: Sequence[Asked]) -> dict[Asked, ScheduleTable]:
    """In the place of `torch_tables`."""

    def call(module: str, wanted: object) -> list[list[str]]:
        assert module == made.__name__
        return made._tables_here(json.loads(json.dumps(wanted)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "call_module", call)
        return torch_tables(asked)
