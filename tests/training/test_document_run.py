"""Runs on whole documents (`data.rows = "documents"`): one loss whatever executor, schedule and number of ranks, tokens
and padding counted, stopped and resumed anywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contracts.observe import fixed_ceilings, write_llama
from tests.models.shapes import KERNELS
from tests.ranks import on_ranks
from tests.training.tiny import WORDS, rows, tiny
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.documents import STARTS
from tilewright.optim.clip import GradClip
from tilewright.planner.machine import ceilings
from tilewright.training.components.run_samples import samples_of_step
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.session import train

pytestmark = pytest.mark.dist
RUN = {
    "model__num_layers": 4, "model__tie_embeddings": "false", "precision__mode": "fp32", "data__rows": "documents",
    "data__seq_len": 48, "train__global_batch_size": 7, "train__micro_batch_size": 2, "train__eval_batches": 3,
    "train__eval_part_batches": 2, "checkpoint__interval": 3, "optim__schedule": "constant", "data__prefetch": 2,
}  # fmt: skip
PIPED = {"parallel__pp": 2}
MAJOR = {"memory__executor": "layer_major"}
ZBV = PIPED | {"parallel__schedule": "zbv"}
INTERLEAVED = PIPED | {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
SHARDS = {"parallel__dp_shard": 2}
STOP = {"train__steps": 3, "train__sample_tokens": 0}
BUDGET = 7 * 48


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """Documents of 3 to 80 words, most of them short."""
    folder = tmp_path_factory.mktemp("short")
    draw = np.random.default_rng(11)
    (folder / "text" / "one").mkdir(parents=True)
    (folder / "text" / "two").mkdir()
    for number in range(240):
        length = int(np.clip(np.exp(draw.normal(2.6, 0.8)), 3, 80))
        text = " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), length))
        (folder / "text" / ("one", "two")[number % 2] / f"{number}.txt").write_text(f"{number} {text}.\n")
    return folder


def runs(rank, data, folder, changes):
    """One rank of several runs, one after the other; what each returns, or the text of the user's error."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    found = {}
    for name, of_run in changes.items():
        try:
            result = train(tiny(Path(data), Path(folder), **RUN | {"run__name": name} | of_run))
            found[name] = result.step, result.loss, {one: value.loss for one, value in result.evals.items()}
        except TilewrightError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def ran(short, tmp_path_factory):
    """The folder of all runs, and what each returned on each rank. One stops half-way, and continues in stages."""
    folder, found = tmp_path_factory.mktemp("documents"), {}

    def launch(world, changes):
        for rank, of_rank in enumerate(on_ranks(world, runs, str(short), str(folder), changes)):
            found.update({(name, world, rank): value for name, value in of_rank.items()})

    launch(1, {"alone": {}, "masks": MASKS | {"train__micro_batch_size": 7}, "piped_shards": STOP})
    launch(2, {"copies": MAJOR | {"parallel__dp_replicate": 2}})
    launch(4, {"piped_shards": ZBV | SHARDS})
    return folder, found


HF = {"model__kind": "hf", "model__path": "llama", "model__tie_embeddings": "true"}
TALKS = {"data__source": "talks.jsonl", "data__format": "chat", "data__chat_template": "chatml"}
TALKS |= {"data__seq_len": 160}
EXPERTS = {"model__num_experts": 4, "model__num_experts_per_token": 2, "model__expert_dim": 16}
KINDS = {"hf": HF, "talks": TALKS | EXPERTS}
LARGE = {"train__micro_batch_size": 7, "train__steps": 3}


def write_talks(path: Path) -> None:
    """Conversations of one question and an answer each."""
    draw = np.random.default_rng(5)
    with path.open("w") as file:
        for number in range(120):
            words = [WORDS[i] for i in draw.integers(0, len(WORDS), int(draw.integers(2, 14)))]
            turns = [("user", f"{number} {words[0]}?"), ("assistant", " ".join(words))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.mark.parametrize("kind", [pytest.param("hf", marks=pytest.mark.slow), "talks"])
def test_no_document_sees_its_neighbours(short, tmp_path, kind):
    """Whatever stands beside a document in its micro-batch: the loss of a step is that of its documents. Relative 1e-5
    after three steps, as above."""
    write_llama(tmp_path / "llama")
    write_talks(tmp_path / "talks.jsonl")
    paths = ("model__path", "data__source")
    of_kind = {name: tmp_path / value if name in paths else value for name, value in KINDS[kind].items()}
    changes = {"small": LARGE | of_kind | {"train__micro_batch_size": 2}, "large": LARGE | of_kind}
    (found,) = on_ranks(1, runs, str(short), str(tmp_path), changes)
    assert not isinstance(found["small"], str), found["small"]
    assert found["small"][0] == found["large"][0] == 3
    assert found["small"][1] == pytest.approx(found["large"][1], rel=1e-5)


MASKS = {"ops__attention": "ref"}  # attention with a mask, to compare with
WORLDS = {"masks": 1, "copies": 2, "piped_shards": 4}
MORE = {"piped": PIPED, "interleaved": INTERLEAVED, "shards": SHARDS}


@pytest.mark.parametrize("name", WORLDS)
def test_the_losses_are_those_of_one_process(ran, name):
    """Relative 1e-5 after six steps: FP32 sums of a step, in another order, and what Adam makes of them."""
    folder, found = ran
    expected, losses = (
        {row["step"]: row["loss"] for row in rows(folder / run / "metrics.jsonl") if "loss" in row}
        for run in ("alone", name)
    )
    assert losses.keys() == expected.keys()
    off = {step: abs(losses[step] - expected[step]) / expected[step] for step in losses}
    worst = max(off, key=off.get)
    assert off[worst] <= 1e-5, f"step {worst}: {losses[worst]}, alone {expected[worst]}"
    world = WORLDS.get(name, 2)
    for rank in range(world):
        step, _, evals = found[name, world, rank]
        assert step == 6
        if name != "masks":  # it evaluates larger batches, and as many
            assert evals == pytest.approx(found["alone", 1, 0][2], rel=1e-5)


@pytest.mark.slow
def test_other_losses_are_those_of_one_process(ran, short):
    """Stages without shards, in two schedules, and shards without stages, also where one process began."""
    folder, found = ran
    on_ranks(1, runs, str(short), str(folder), {"stopped": STOP})
    for rank, of_rank in enumerate(on_ranks(2, runs, str(short), str(folder), MORE | {"stopped": SHARDS})):
        found = found | {(name, 2, rank): value for name, value in of_rank.items()}
    for name in (*MORE, "stopped"):
        test_the_losses_are_those_of_one_process((folder, found), name)


def test_tokens_and_padding_are_counted(ran):
    folder, _ = ran
    told = [row for row in rows(folder / "alone" / "metrics.jsonl") if "documents" in row]
    tokens = np.diff([0, *(row["tokens"] for row in told)])
    assert len(told) == 6
    assert (tokens <= BUDGET).all()
    assert (tokens > BUDGET - 48).all()
    assert all(row["documents"] > 7 and 0 <= row["padding"] < 0.5 for row in told)
    assert all(row["micro_batches"] >= 4 for row in told)
    shared = [row for row in rows(folder / "piped_shards" / "metrics.jsonl") if "documents" in row]
    assert [row["tokens"] for row in shared] == [row["tokens"] for row in told]
    assert [row["documents"] for row in shared] == [row["documents"] for row in told]


def test_the_documents_of_a_step_are_told(ran):
    """Of the run on four ranks too: those are the same, and their tokens are the ones that were counted."""
    folder, _ = ran
    tokens = np.diff([0, *(row["tokens"] for row in rows(folder / "alone" / "metrics.jsonl") if "documents" in row)])
    for step in (1, 2, 6):
        samples = [samples_of_step(folder / name, step) for name in ("alone", "piped_shards")]
        assert samples[0] == samples[1]
        pieces = [document for sample in samples[0] for document in sample["documents"]]
        assert len(pieces) == len(samples[0])
        assert sum(piece["length"] for piece in pieces) == tokens[step - 1]


def test_memory_is_planned_for_the_longest_micro_batch(ran):
    """No length that comes is a change of the rows' shape, at which the run would be planned again."""
    folder, _ = ran
    said = [row["message"] for row in rows(folder / "alone" / "events.jsonl") if row["kind"] == "replan"]
    assert not [text for text in said if text.startswith("shape")]


def test_the_plan_says_what_it_took_documents_for(ran):
    """Full rows, and beside it the lengths that the prepared data have."""
    folder, _ = ran
    for run in ("alone", "piped_shards"):
        notes = json.loads((folder / run / "plan.json").read_text())["notes"]
        assert len([note for note in notes if note.startswith("whole documents are planned as full rows of 48")]) == 1
        (told,) = [note for note in notes if note.startswith("documents of this data have ")]
        mean, share = float(told.split()[5]), float(told.split(" takes ")[1].split()[0])
        assert any("the seconds of attention are those of the data's lengths" in note for note in notes)
        assert 5 < mean < 40
        assert mean / 48 < share / 100 < 1, "long ones have most of the pairs"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.format": "preferences", "data.source": "pairs.jsonl"}, "Pairs of preferences cannot be put behind"),
        ({"model.task": "image_classification", "data.source": "images"}, "Images are no documents"),
    ],
)
def test_what_is_no_document_is_refused(changes, what):
    with pytest.raises(ConfigError, match=what) as caught:
        load_recipe(None, {"data.rows": "documents"} | changes, environ={})
    (problem,) = [problem for problem in caught.value.problems if what in problem.what]
    assert problem.got
    assert problem.need
    assert 'data.rows = "packed"' in problem.try_


def test_steps_without_targets_are_skipped_and_counted():
    """What a rank without documents gets: padding alone, which changes no gradient and is no target."""
    model = Decoder(DecoderConfig.of(vocab_size=50, dim=32, num_heads=2, num_layers=2), KERNELS)
    init_weights(model, seed=0)
    padding = {"input_ids": torch.zeros(1, 64, dtype=torch.int64), "labels": torch.full((1, 64), -100)}
    padding |= {"positions": torch.zeros(1, 64, dtype=torch.int64), "segments": torch.full((1, 64), -1).int()}
    padding |= {STARTS: torch.tensor([0, 64], dtype=torch.int32)}
    executor = StandardExecutor(model, torch.optim.SGD(model.parameters()), clip=GradClip(1.0))
    before = [param.clone() for param in model.parameters()]
    result = executor.step([padding, padding], 0.1)
    assert (result.skipped, result.num_targets, result.num_tokens) == ("the batch holds no targets", 0, 0)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
