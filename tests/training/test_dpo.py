"""Direct preference optimization equals the formula of its paper in a plain FP32 loop."""

import json
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_sft import WORDS, make_model
from tests.training.tiny import rows, tiny
from tilewright.core.errors import ConfigError
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.planner.machine import ceilings
from tilewright.training.assemble import build, set_up
from tilewright.training.components.reference_logprobs import FILE, attach_reference, weights_digest
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")


def _say(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 9)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rng = random.Random(1)
    found = [{"prompt": _say(rng), "chosen": "yes " + _say(rng), "rejected": "no " + _say(rng)} for _ in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def dpo(pairs, model, runs, **changes):
    given = {
        "data__source": pairs / "a.jsonl",
        "data__cache_dir": runs / "cache",
        "data__format": "preferences",
        "data__seq_len": 64,
        "data__holdout": 0.1,
        "model__kind": "hf",
        "model__path": model,
        "model__weights": "load",
        "precision__mode": "fp32",
        "train__global_batch_size": 8,
        "train__micro_batch_size": 4,
        "train__eval_interval": 0,
        "checkpoint__interval": 0,
        "optim__clip_norm": 0.0,
        "optim__warmup_steps": 0,
        "optim__schedule": "constant",
        "optim__weight_decay": 0.0,
    }
    return tiny(pairs, runs, **given | changes)


def _started(loaded):
    setup = set_up(loaded)
    parts = build(setup, fresh=True)
    attach_reference(setup.recipe, setup.prepared, setup.device, lambda: nullcontext(parts.model))
    return setup, parts


def _plain_logp(net, ids, labels):
    """Sum of the log probabilities of the targets, from a full softmax."""
    logps = net(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    wanted = labels != -100
    return logps[wanted].gather(-1, labels[wanted, None]).sum()


def _plain_loss(net, frozen, batches, beta):
    """The mean over all pairs of formula 7, and of its two metrics."""
    losses, margins = [], []
    for batch in batches:
        for ids_2S, labels_2S, segments_2S in zip(batch["input_ids"], batch["labels"], batch["segments"], strict=True):
            policy, before = [], []
            for ids, labels, segments in zip(ids_2S, labels_2S, segments_2S, strict=True):
                policy.append(_plain_logp(net, ids[segments >= 0], labels[segments >= 0]))
                with torch.no_grad():
                    before.append(_plain_logp(frozen, ids[segments >= 0], labels[segments >= 0]))
            margin = beta * ((policy[0] - policy[1]) - (before[0] - before[1]))
            losses.append(-torch.log(torch.sigmoid(margin)))
            margins.append(float(margin.detach()))
    return torch.stack(losses).mean(), margins


@pytest.mark.parametrize(
    ("kind", "beta"),
    [
        ("decoder", 0.5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("hf", 0.1), ("hf", 0.5), ("decoder", 0.1))),
    ],
)
@pytest.mark.support("pairs", "one")
def test_losses_and_margins_are_those_of_a_plain_loop(kind, beta, model, pairs, tmp_path):
    _, parts = _started(dpo(pairs, model, tmp_path, model__kind=kind, train__dpo_beta=beta))
    load = transformers.AutoModelForCausalLM.from_pretrained
    net, frozen = (load(model, dtype=torch.float32, attn_implementation="eager") for _ in range(2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(12):
        batches = parts.stream.next_step()
        optimizer.zero_grad()
        expected, margins = _plain_loss(net, frozen, batches, beta)
        expected.backward()
        result = parts.executor.step(batches, 1e-3)
        optimizer.step()
        assert result.loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert result.aux["margin"] == pytest.approx(float(np.mean(margins)), abs=1e-4)
        assert result.num_targets == 4
        if step == 0:
            assert result.loss == pytest.approx(np.log(2), abs=1e-6), "the model is its own reference"
    assert np.mean(margins) > 0.05 * beta
    parts.close()


def test_gradients_equal_and_prompts_give_none(model, pairs, tmp_path):
    _, parts = _started(dpo(pairs, model, tmp_path))
    load = transformers.AutoModelForCausalLM.from_pretrained
    net, frozen = (load(model, dtype=torch.float32, attn_implementation="eager") for _ in range(2))
    batches = parts.stream.next_step()
    expected, _ = _plain_loss(net, frozen, batches, 0.1)
    expected.backward()
    for batch in batches:
        (parts.model.loss(batch).loss_sum / 4).backward()
    for (name, param), theirs in zip(parts.model.named_parameters(), net.parameters(), strict=True):
        assert (param.grad - theirs.grad).abs().max() <= 1e-5, name
    tokenizer = load_tokenizer(model)
    for labels in batches[0]["labels"].flatten(0, 1):
        text = tokenizer.backend.decode(labels[labels != -100].tolist(), skip_special_tokens=False)
        assert text.startswith(("yes", "no"))
        assert text.endswith("<|eot_id|>")
    parts.close()


def test_the_reference_is_computed_once_and_belongs_to_weights_and_data(model, pairs, tmp_path):
    loaded = dpo(pairs, model, tmp_path)
    setup, parts = _started(loaded)

    def never():
        raise AssertionError("the reference is on disk")

    attach_reference(setup.recipe, setup.prepared, setup.device, never)
    key = f"reference-{setup.prepared.fingerprint[:16]}-{weights_digest(setup.recipe)}"
    again = np.load(Path(setup.recipe.data.cache_dir) / "data" / key / FILE)
    assert again.shape == (setup.prepared.num_pairs, 2)
    frozen = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for batch, (chosen, rejected) in zip(setup.prepared.all_pairs(), again, strict=True):
        kept = batch["segments"][0] >= 0
        for answer, value in enumerate((chosen, rejected)):
            ids, labels = batch["input_ids"][0, answer][kept[answer]], batch["labels"][0, answer][kept[answer]]
            assert float(_plain_logp(frozen, ids, labels)) == pytest.approx(float(value), abs=1e-4)
    other = make_model(tmp_path / "other")
    changed = dpo(pairs, other, tmp_path).recipe
    assert weights_digest(changed) == weights_digest(loaded.recipe), "the same weights in another place"
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-1] + b"x")
    assert weights_digest(changed) != weights_digest(loaded.recipe)
    parts.close()


@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_run_raises_the_margin_resumes_and_records_it(lora, model, pairs, tmp_path):
    changes = {"lora__rank": lora, "optim__lr": 3e-3, "train__log_interval": 1, "model__kind": "decoder"}
    changes |= {"train__eval_interval": 3, "checkpoint__interval": 3}
    straight = train(dpo(pairs, model, tmp_path, run__name="straight", train__steps=6, **changes))
    train(dpo(pairs, model, tmp_path, run__name="parts", train__steps=3, **changes))
    for entry in (tmp_path / "cache" / "data").glob("reference-*"):  # the starting weights are found again
        if entry.is_dir():
            shutil.rmtree(entry)
    resumed = train(dpo(pairs, model, tmp_path, run__name="parts", train__steps=6, **changes))
    steps = [[r for r in rows(run.run_dir / "metrics.jsonl") if "loss" in r] for run in (straight, resumed)]
    assert [r["loss"] for r in steps[0]] == [r["loss"] for r in steps[1]]
    assert steps[0][0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[0][-1]["loss"] < steps[0][0]["loss"]
    assert all("margin" in r["aux"] if "aux" in r else "margin" in r for r in steps[0])


def _own_cache(rank, runs):
    """Let this rank be on a machine of its own, with a cache of its own; what was compiled is there."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    compiled = Path(platformdirs.user_cache_dir("tilewright")) / "kernels"
    os.environ["XDG_CACHE_HOME"] = str(runs / f"machine{rank}")
    cache = Path(platformdirs.user_cache_dir("tilewright"))
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(compiled)
    return cache


def _rank(rank, model, pairs, runs, changes):
    """Losses of a run: on several ranks in two parts. In the second the last rank finds no reference, and has the
    starting weights again."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    apart = "parallel__dp_shard" in changes and not changes.get("parallel__dp_replicate")
    cache = _own_cache(rank, runs) if apart else runs / "cache"
    world = int(os.environ["WORLD_SIZE"])
    for steps in (4,) if world == 1 else (2, 4):
        for entry in (cache / "data").glob("reference-*") if rank + 1 == world else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        where = {"data__cache_dir": "" if apart else cache}
        train(dpo(pairs, model, runs, train__steps=steps, **where | changes))
    return [row["loss"] for row in rows(runs / "tiny" / "metrics.jsonl") if "loss" in row]


@pytest.mark.dist
@pytest.mark.parametrize("mesh", [pytest.param("copies", marks=pytest.mark.slow), "shards"])
@pytest.mark.support("pairs", "copies", "shards")
def test_ranks_have_the_losses_of_one_process(mesh, model, pairs, tmp_path):
    """Shards are on machines with caches of their own: where one lacks the reference, all compute it together."""
    changes = {"model__kind": "decoder", "optim__lr": 3e-3, "train__log_interval": 1, "precision__mode": "fp32"}
    (alone,) = on_ranks(1, _rank, model, pairs, tmp_path / "one", changes)
    sizes = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1} if mesh == "copies" else {"parallel__dp_shard": 2}
    first, second = on_ranks(2, _rank, model, pairs, tmp_path / "two", changes | sizes)
    assert first == second
    assert first == pytest.approx(alone, rel=2e-5)
    assert alone[0] == pytest.approx(np.log(2), abs=1e-6)


def test_what_a_pair_cannot_be_is_refused(model, pairs, tmp_path):
    with pytest.raises(ConfigError, match="even"):
        dpo(pairs, model, tmp_path, train__micro_batch_size=3)
    with pytest.raises(ConfigError, match="standard executor"):
        dpo(pairs, model, tmp_path, memory__executor="layer_major")
    bad = [
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        {"prompt": "a", "chosen": "", "rejected": "x"},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]},
        {"prompt": [{"role": "user", "content": "b"}], "chosen": [{"role": "user", "content": "x"}], "rejected": "y"},
        {"chosen": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "rejected": "y"},
    ]
    lists = {"role": "user", "content": "hello you"}
    good = {
        "chosen": [lists, {"role": "assistant", "content": "yes"}],
        "rejected": [lists, {"role": "assistant", "content": "no"}],
    }
    file = tmp_path / "mixed" / "a.jsonl"
    file.parent.mkdir()
    file.write_text((pairs / "a.jsonl").read_text() + "".join(json.dumps(row) + "\n" for row in [*bad, good]))
    setup = set_up(dpo(file.parent, model, tmp_path, data__source=file))
    read = setup.prepared.summary["read"]["documents"]
    assert read == {"found": 46, "used": 41, "refused": 5}
    assert {"chosen and rejected are equal", "empty content", "row without chosen and rejected"} <= set(
        setup.prepared.summary["refused"]
    )
    assert isinstance(setup.prepared.template, ChatTemplate)
