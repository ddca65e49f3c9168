"""Training loss by domain: what each row's loss says, summed by the domain of the row, on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.data.batches.microbatches import sums_by_document, sums_by_row
from tilewright.data.mixing.domain_sums import DomainSums
from tilewright.ops.base.documents import STARTS
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.step_hook import StepHook
from tilewright.training.session import train

SMALL = {"precision__mode": "fp32", "train__log_interval": 1, "train__eval_interval": 0, "train__sample_tokens": 0}
SMALL |= {"checkpoint__interval": 0, "train__steps": 4}
DOCUMENTS = {"data__rows": "documents", "data__seq_len": 64}


class ByHand(StepHook):
    """Each row's loss before the step, by the model itself, one row at a time; its domain by its sample."""

    def __init__(self, parts, found):
        self.parts, self.found = parts, found

    def before_step(self, step):
        stream, sums = self.parts.stream, {}
        samples = stream.samples_of(step.number - 1)
        losses = [pair for batch in step.microbatches for pair in self.alone(batch)]
        assert len(losses) == len(samples)
        for sample, (loss, count) in zip(samples, losses, strict=True):
            domain = stream.explain(sample)["domain"]
            before = sums.get(domain, (0.0, 0))
            sums[domain] = before[0] + loss, before[1] + count
        self.found.append({name: (loss / count, count) for name, (loss, count) in sums.items()})
        return step

    @torch.no_grad()
    def alone(self, batch):
        if STARTS in batch:
            each = self.parts.model.loss(batch).each
            sums, counts = sums_by_document(each, batch)
            return list(zip(sums[0].tolist(), counts[0].tolist(), strict=True))
        single = [{name: t[i : i + 1] for name, t in batch.items()} for i in range(len(batch["labels"]))]
        told = [self.parts.model.loss(one) for one in single]
        return [(float(one.loss_sum), int(one.count)) for one in told]


@pytest.mark.parametrize(
    "how", [{}, {"memory__executor": "layer_major"}, DOCUMENTS], ids=["standard", "layer_major", "documents"]
)
def test_the_loss_of_each_domain_is_that_of_its_rows(how, data, tmp_path):
    found = []
    train(tiny(data, tmp_path, **SMALL | how), hooks=[lambda _, parts: ByHand(parts, found)])
    written = [row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "loss" in row]
    assert len(written) == len(found) == 4
    for row, expected in zip(written, found, strict=True):
        told = row["train_domains"]
        assert {name: one["tokens"] for name, one in told.items()} == {name: n for name, (_, n) in expected.items()}
        worst = max(abs(told[name]["loss"] / loss - 1) for name, (loss, _) in expected.items())
        assert worst < 1e-5, (
            f"step {row['step']}: {worst:.2g} off"
        )  # FP32 sums of at most 32 x 5 losses, and 2^-20 nats
        total = sum(one["tokens"] for one in told.values())
        mean = sum(one["loss"] * one["tokens"] for one in told.values()) / total
        assert mean == pytest.approx(row["loss"], rel=1e-5)


def test_steps_between_two_lines_are_in_the_second(data, tmp_path):
    for name, interval in (("each", 1), ("third", 3)):
        train(tiny(data, tmp_path, **SMALL | {"run__name": name, "train__log_interval": interval, "train__steps": 7}))
    each, third = (
        [row["train_domains"] for row in rows(tmp_path / name / "metrics.jsonl") if "train_domains" in row]
        for name in ("each", "third")
    )
    assert len(third) == 4, "of steps 1, 3, 6 and 7"
    for line, steps in zip(third, (each[:1], each[1:3], each[3:6], each[6:]), strict=True):
        for name in ("alpha", "beta"):
            of = [step[name] for step in steps if name in step]
            count = sum(one["tokens"] for one in of)
            assert line[name]["tokens"] == count
            assert line[name]["loss"] == pytest.approx(sum(one["loss"] * one["tokens"] for one in of) / count, rel=1e-6)


@pytest.mark.slow
def test_a_stop_between_two_lines_loses_nothing(data, tmp_path):
    how = {"train__log_interval": 3, "checkpoint__interval": 1, "optim__schedule": "constant"}
    train(tiny(data, tmp_path, run__name="stopped", train__steps=4, **how))
    for name in ("stopped", "whole"):
        train(tiny(data, tmp_path, run__name=name, train__steps=8, **how))
    last = [rows(tmp_path / name / "metrics.jsonl") for name in ("stopped", "whole")]
    told = [[row["train_domains"] for row in one if "train_domains" in row and row["step"] > 6] for one in last]
    assert told[0] == told[1]
    tensors = [sum(row["train_domains"]["alpha"]["tokens"] for row in one if "train_domains" in row) for one in last]
    assert tensors[0] == tensors[1]


def run(rank, data, folder, cases):
    """One rank of several runs."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    for name, changes in cases.items():
        train(tiny(Path(data), Path(folder), run__name=name, **SMALL | changes))


MESHES = {
    "copies": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1},
    "stages": {"parallel__pp": 2, "train__global_batch_size": 6, "model__tie_embeddings": "false"},
    "documents": {"parallel__pp": 2, "model__tie_embeddings": "false", **DOCUMENTS},
}


@pytest.mark.dist
@pytest.mark.parametrize("names", [("copies", "documents"), pytest.param(("stages",), marks=pytest.mark.slow)])
def test_ranks_tell_what_one_process_tells(data, tmp_path, names):
    """Copies with uneven rows, stages, and stages of whole documents."""
    cases = {name: MESHES[name] for name in names}
    on_ranks(2, run, str(data), str(tmp_path / "ranks"), cases)
    for name, changes in cases.items():
        alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
        train(tiny(data, tmp_path / "alone", run__name=name, **SMALL | alone))
        ours, theirs = (
            [row["train_domains"] for row in rows(tmp_path / where / name / "metrics.jsonl") if "train_domains" in row]
            for where in ("ranks", "alone")
        )
        assert len(ours) == len(theirs) == 4
        for mine, one in zip(ours, theirs, strict=True):
            assert {k: v["tokens"] for k, v in mine.items()} == {k: v["tokens"] for k, v in one.items()}, name
            worst = max(abs(mine[k]["loss"] / one[k]["loss"] - 1) for k in one)
            assert worst < 5e-6, f"{name}: {worst:.2g} off"


def test_sums_do_not_depend_on_order_or_on_how_they_are_cut():
    domains, losses = np.random.randint(0, 3, 500), np.random.random(500) * 1e4
    counts, whole = np.random.randint(1, 99, 500), DomainSums(("a", "b", "c"))
    whole.add(domains, losses, counts)
    order = np.random.permutation(500)
    cut = DomainSums(("a", "b", "c"))
    for part in np.array_split(order, 13):
        cut.add(domains[part], losses[part], counts[part])
    assert (cut.counts == whole.counts).all()
    for place, name in enumerate("abc"):
        here = domains == place
        assert whole.means()[name] == pytest.approx(losses[here].sum() / counts[here].sum(), rel=2**-20)
    whole.add(np.array([1, 0]), np.array([np.nan, 1.0]), np.array([4, 4]))
    assert np.isnan(whole.means()["b"])
    assert np.isfinite(whole.means()["a"])


def test_documents_behind_each_other_are_rows_each():
    """Against `sums_by_document`, which goes by segments; also with padding, and none at all."""
    lengths = [5, 1, 7]
    for padding in (0, 3):
        total = sum(lengths) + padding
        segments = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*lengths, padding]))[None].int()
        labels = torch.randint(0, 9, (1, total)).masked_fill(segments < 0, -100)
        labels[0, 2] = -100
        each = torch.rand(1, total) * (labels != -100)
        ends = np.cumsum([0, *lengths, *([padding] if padding else [])])
        batch = {"labels": labels, "segments": segments, STARTS: torch.from_numpy(ends).int()}
        sums, counts = sums_by_row(each, batch)
        expected, numbers = sums_by_document(each, batch)
        torch.testing.assert_close(sums, expected[0], rtol=7 * 2**-23, atol=0)
        assert counts.tolist() == numbers[0].tolist()
    blank = {"labels": torch.full((1, 4), -100), "segments": torch.full((1, 4), -1).int(), STARTS: torch.tensor([0, 4])}
    assert [len(one) for one in sums_by_row(torch.zeros(1, 4), blank)] == [0, 0]
