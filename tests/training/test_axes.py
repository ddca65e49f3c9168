"""An axis that cuts nothing: ranks along `tp` hold the same parts here and read the same rows. What a run sums, reads,
evaluates, draws, decides and saves is that of the ranks that read other rows alone."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import last_state, rows, tiny
from tilewright.parallel import parallelize
from tilewright.parallel.launch import launched
from tilewright.planner.machine import ceilings
from tilewright.training import session
from tilewright.training.executor.standard import StandardExecutor

pytestmark = [pytest.mark.dist, pytest.mark.slow]
"""By default runs with matrices that are cut are those of one process (`test_tensor_run`, `test_cut_stages_run`)."""
MESHES = {
    "copies": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1},
    "shards": {"parallel__dp_shard": 2, "optim__moments": "8bit"},
}
MODEL = {
    "train__eval_interval": 3, "train__steps": 4, "train__log_interval": 1, "train__sample_tokens": 0,
    "checkpoint__interval": 0,
}  # fmt: skip
"""Without experts: those are spread over ranks along `tp` whatever is cut (`inside.tensor.test_mixtures`)."""


class Steps:
    """What this rank's executor was given and found; of the generators what the ranks that read other rows draw."""

    def __init__(self, plant):
        self.seen, before = [], StandardExecutor.step

        def step(executor, microbatches, lr):
            digest = xxhash.xxh3_64()
            for batch in microbatches:
                for name in sorted(batch):
                    digest.update(batch[name].numpy().tobytes())
            drawn = xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes())
            plant(len(self.seen))
            result = before(executor, microbatches, lr)
            told = sorted(result.aux.items())
            numbers = result.loss, result.num_targets, result.num_tokens, result.grad_norm, result.skipped, told
            self.seen.append((digest.hexdigest(), drawn, numbers))
            return result

        StandardExecutor.step = step  # this process is the test's own


def _asked_to_stop(step):
    """What one rank alone meets before a step of its executor."""
    if step == 2:
        signal.raise_signal(signal.SIGTERM)


def rank_main(rank, data, runs, axes, asked):
    """Runs on each mesh, with other axes beside it. `asked`: the rank that is asked to stop, by mesh."""
    ceilings.measure = fixed_ceilings
    parallelize.cut_tensors = lambda *_, **__: None  # what `tp` is there for
    session.launched = lambda sizes, **given: launched(replace(sizes, **axes), **given)
    before, found = StandardExecutor.step, {}
    for name, mesh in MESHES.items():
        StandardExecutor.step = before
        steps = Steps(_asked_to_stop if rank == asked.get(name) else lambda step: None)
        result = session.train(tiny(Path(data), Path(runs) / name, **MODEL, **mesh))
        found[name] = result.step, result.stopped, steps.seen
    return found


def test_ranks_along_another_axis_change_no_number(data, tmp_path):
    """With tp = 2 beside two copies, and beside two shards, against these alone. Rank 1 of the shards, the second along
    tp, is asked to stop, and all do."""
    alone = on_ranks(2, rank_main, str(data), str(tmp_path / "alone"), {}, {})
    beside = on_ranks(4, rank_main, str(data), str(tmp_path / "beside"), {"tp": 2}, {"shards": 1})
    for name in MESHES:
        (end, stopped, first), (_, _, second) = (of_rank[name] for of_rank in alone)
        assert (end, stopped, len(first)) == (4, None, 4)
        assert all(one[0] != other[0] and one[1] != other[1] for one, other in zip(first, second, strict=True))
        for rank, (end, stopped, seen) in enumerate(of_rank[name] for of_rank in beside):
            want = (first, second)[rank // 2]
            assert seen == want[: len(seen)], f"{name}, rank {rank}"
            assert (end, stopped) == ((4, None) if name == "copies" else (3, "SIGTERM (rank 1)"))
    runs = [[tmp_path / way / name / "tiny" for way in ("alone", "beside")] for name in MESHES]
    for folders in runs:
        metrics = [[row for row in rows(folder / "metrics.jsonl") if row["step"] < 3] for folder in folders]
        names = ("step", "loss", "ppl", "grad_norm", "tokens")
        kept = [[[row.get(name) for name in names] for row in of_run] for of_run in metrics]
        assert kept[0] == kept[1]
    (tensors, _), (expected, _) = (last_state(folder) for folder in reversed(runs[0]))
    model = {name for name in expected if not name.startswith("rng.")}
    assert model == {name for name in tensors if not name.startswith("rng.")}
    for name in model:
        assert torch.equal(tensors[name], expected[name]), name
