"""A teacher's tokens on disk: what is there is read, in any order, and a folder of something else is refused."""

import random
import shutil

import pytest
import torch

from tests.training.tiny import last_state, rows, tiny
from tilewright.core.errors import ConfigError, DataError, FitError
from tilewright.models.distill import loss as distill
from tilewright.models.distill.top_k import top_k_of
from tilewright.models.teacher_folder import all_rows_are_kept
from tilewright.ops.kernels import Kernels
from tilewright.training.assemble import build, set_up
from tilewright.training.components.teacher import Teacher
from tilewright.training.components.teacher_rows import TeacherRows
from tilewright.training.session import train

TOP_K, VOCAB = 5, 300


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    return train(tiny(data, tmp_path_factory.mktemp("teacher"), precision__mode="fp32", log__report=False)).run_dir


def open_rows(folder, **made_of):
    return TeacherRows(
        folder, {"teacher": "a", "data": "b"} | made_of, top_k=TOP_K, vocab_size=VOCAB, divergence="reverse_kl"
    )


def batch_of(count, length, generator):
    ids = torch.randint(VOCAB, (count, length), generator=generator)
    segments = (torch.rand(count, length, generator=generator) < 0.1).cumsum(-1)
    tokens = torch.randint(VOCAB, (count, length, TOP_K), generator=generator)
    logs = torch.randn(count, length, TOP_K + 1, generator=generator).log_softmax(-1)
    return {"input_ids": ids, "segments": segments, "labels": ids}, tokens, logs


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_found_in_any_order_and_company(seed, tmp_path):
    generator = torch.Generator().manual_seed(seed)
    batches = [batch_of(3, length, generator) for length in (4, 9, 17, 9)]
    kept = open_rows(tmp_path)
    for batch, tokens, logs in batches:
        assert kept.find(batch) == [None] * 3
        kept.add(batch, tokens, logs)
        kept.add(batch, tokens, logs)
    again, order = open_rows(tmp_path), random.Random(seed)
    assert len(again) == len(kept) == 12
    for batch, tokens, logs in order.sample(batches, 4):
        mixed = order.sample(range(3), 3)
        found = again.find({name: tensor[mixed] for name, tensor in batch.items()})
        for row, one in zip(mixed, found, strict=True):
            assert one is not None
            assert torch.equal(one[0], tokens[row])
            assert (one[1] - logs[row]).abs().max() < 2**-11 + 1e-5  # see `test_top_k`
    (batch, _, _) = batches[0]
    assert again.find({**batch, "segments": batch["segments"] + 1}) == [None] * 3
    assert again.find({**batch, "input_ids": (batch["input_ids"] + 1) % VOCAB}) == [None] * 3


@pytest.mark.parametrize("seed", range(8))
def test_damaged_and_torn_records_count_as_missing(seed, tmp_path):
    """Any byte changed, or a file cut anywhere, as a kill leaves it: what is read is right or not there."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    batch, tokens, logs = batch_of(4, 6, generator)
    open_rows(tmp_path).add(batch, tokens, logs)
    expected = open_rows(tmp_path).find(batch)
    (path,) = tmp_path.glob("*.rows")
    content = bytearray(path.read_bytes())
    if seed % 2:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    path.write_bytes(content)
    kept = open_rows(tmp_path)
    found = kept.find(batch)
    assert any(one is None for one in found)
    for one, right in zip(found, expected, strict=True):
        assert one is None or all(map(torch.equal, one, right))
    kept.add(batch, tokens, logs)
    assert None not in kept.find(batch)
    assert None not in open_rows(tmp_path).find(batch)


@pytest.mark.parametrize("name", ["teacher", "data"])
def test_a_folder_of_something_else_is_refused(name, tmp_path):
    open_rows(tmp_path)
    with pytest.raises(ConfigError, match="another teacher or of other data") as error:
        open_rows(tmp_path, **{name: "other"})
    assert f"{name} other" in error.value.problems[0].need
    (tmp_path / "teacher.json").write_text("[")
    with pytest.raises(ConfigError, match="another teacher or of other data"):
        open_rows(tmp_path)


def test_bad_folders_and_full_disks_say_why(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept or read"):
        open_rows(tmp_path / "file" / "below")
    kept = open_rows(tmp_path / "rows")
    free = shutil._ntuple_diskusage(100, 50, 50 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    kept.check_room(10_000, 100)
    with pytest.raises(FitError, match="no room for the teacher's tokens") as error:
        kept.check_room(30_000, 100)
    assert error.value.problems[0].where == "distill.cache"


def options_of(teacher, folder):
    return {
        "precision__mode": "fp32", "distill__teacher": teacher, "distill__cache": folder, "log__report": False,
        "train__eval_interval": 0, "optim__schedule": "constant",
    }  # fmt: skip


def told(run):
    lines = [row["teacher_rows"] for row in rows(run / "metrics.jsonl") if "teacher_rows" in row]
    return {name: sum(line[name] for line in lines) for name in ("read", "made", "damaged")}


@pytest.mark.parametrize("executor", ["standard", pytest.param("layer_major", marks=pytest.mark.slow)])
def test_a_run_reads_what_an_earlier_one_kept(executor, teacher, data, tmp_path):
    """The second run, of another order and other weights of domains, opens no teacher for rows that are there; the same
    order again gives the same weights, bit for bit."""
    options = options_of(teacher, tmp_path / "cache") | {"memory__executor": executor}
    first = train(tiny(data, tmp_path, run__name="first", **options)).run_dir
    second = train(tiny(data, tmp_path, run__name="second", **options)).run_dir
    assert told(first)["made"] > 0
    assert told(second) == {"read": told(first)["made"] + told(first)["read"], "made": 0, "damaged": 0}
    recipe = lambda **more: tiny(data, tmp_path, **options | more).recipe  # noqa: E731
    assert all_rows_are_kept(recipe())
    for other in ({"train__steps": 99}, {"run__seed": 3}, {"data__seq_len": 16}, {"distill__cache": tmp_path}):
        assert not all_rows_are_kept(recipe(**other)), other
    (tensors, _), (expected, _) = last_state(second), last_state(first)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []
    other = {"data__weights": "{alpha = 3, beta = 1}", "run__seed": 3, "train__steps": 8}
    third = train(tiny(data, tmp_path, run__name="third", **options | other)).run_dir
    assert told(third)["read"] > 0


@pytest.mark.slow
def test_resume_equals_never_having_stopped(teacher, data, tmp_path):
    """With a folder of its own each, so that rows are made before the stop and after it."""
    whole = train(
        tiny(data, tmp_path, run__name="whole", train__steps=4, **options_of(teacher, tmp_path / "a"))
    ).run_dir
    part = options_of(teacher, tmp_path / "b") | {"run__name": "part"}
    train(tiny(data, tmp_path, **part, train__steps=2))
    resumed = train(tiny(data, tmp_path, **part, train__steps=4)).run_dir
    (tensors, _), (expected, _) = last_state(resumed), last_state(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_all_tokens_but_one_teach_as_the_live_teacher(teacher, data, tmp_path):
    """The groups are the vocabulary then: losses differ by the rounding of what is kept."""
    losses = []
    for name, cache in (("live", ""), ("kept", tmp_path / "cache")):
        options = options_of(teacher, cache) | {"distill__cache_top_k": 256, "run__name": name}
        run = train(tiny(data, tmp_path, **options)).run_dir
        losses.append([row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row])
    # bound: 2^-12 nats of a log-probability, and what 256 of 300 tokens leave
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_settings_of_the_cache(teacher, data, tmp_path):
    """`cache_top_k` tokens travel with a batch; data of another length is other data; documents are refused."""
    for top_k in (3, 7):
        options = options_of(teacher, tmp_path / str(top_k)) | {"distill__cache_top_k": top_k}
        parts = build(set_up(tiny(data, tmp_path, run__name=str(top_k), **options)), fresh=True)
        batch = parts.hook(Teacher).taught(parts.stream.next_step())[0]
        parts.close()
        assert batch[distill.TOKENS].shape[-1] == top_k
        assert batch[distill.LOGS].shape[-1] == top_k + 1
        assert distill.HIDDEN not in batch
    with pytest.raises(ConfigError, match="another teacher or of other data") as error:
        train(tiny(data, tmp_path, run__name="long", **options | {"data__seq_len": 64}))
    assert "data " in error.value.problems[0].need
    with pytest.raises(ConfigError, match="rows that come again"):
        tiny(data, tmp_path, **options | {"data__rows": "documents"})


@pytest.mark.parametrize("rows", [1, 4, 9, 100])
def test_chunks_of_any_size_have_one_loss(rows):
    """The loss of a model's head and its gradients, cut into chunks or in one piece."""
    head, x_1ND = torch.nn.Linear(8, 40, bias=False), torch.randn(1, 9, 8)
    ids, logs = top_k_of(torch.randn(9, 40).log_softmax(-1), TOP_K)
    labels = torch.randint(40, (1, 9))
    labels[0, 2] = -100
    batch = {"labels": labels, distill.TOKENS: ids[None], distill.LOGS: logs[None]}
    batch[distill.HOW] = distill.how(2.0, 0.5, "forward_kl")
    found = []
    for chunk in (rows, 1000):
        kernels = Kernels(Kernels.default().machine, loss_chunk_bytes=4 * 40 * chunk)
        x = x_1ND.clone().requires_grad_()
        head.zero_grad()
        out = distill.batch_loss(kernels, head, x.flatten(0, 1), batch)
        out.loss_sum.backward()
        found.append((out.loss_sum.detach(), out.each, x.grad, head.weight.grad.clone()))
    for one, whole in zip(*found, strict=True):
        # bound: FP32 sums of 9 rows in another order
        assert (one - whole).abs().max() <= 1e-5 * whole.abs().max()
