"""Runs whose held-out part is the user's own file, or that hold nothing out."""

import json
import math
import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.cover import some
from tests.training.test_dpo import dpo
from tests.training.test_sft import make_model, sft, talks
from tests.training.tiny import rows, tiny
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.trained_tokens import samples
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.report.page import render
from tilewright.report.run_data.collect_run import collect
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder for each form, with a.jsonl to train on and valid.jsonl; 5 rows are in both."""
    found = {}
    for form in ("text", "chat", "preferences"):
        folder = found[form] = tmp_path_factory.mktemp(form)
        made = [{"messages": t} for t in talks(50)]
        if form == "text":
            made = [{"text": " ".join(m["content"] for m in row["messages"]) + f" {i}"} for i, row in enumerate(made)]
        elif form == "preferences":
            rng = random.Random(3)
            said = [row["messages"][:2] for row in made]
            made = [
                {"prompt": q["content"] + f" {i}", "chosen": a["content"], "rejected": f"no {rng.random()}"}
                for i, (q, a) in enumerate(said)
            ]
        for name, mine in (("a", made[:40]), ("valid", made[35:])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
    return found


def run(form, files, model, tmp_path, **more):
    folder = files[form]
    how = {"data__holdout": 0.0, "train__steps": 2, "train__eval_batches": 50} | more
    if form == "preferences":
        return train(dpo(folder, model, tmp_path, **how))
    if form == "chat":
        return train(sft(folder, model, tmp_path, **how))
    how |= {"data__source": folder / "a.jsonl", "data__cache_dir": tmp_path / "cache"}
    return train(tiny(folder, tmp_path, **how))


@pytest.mark.parametrize("form", some(("text", "chat", "preferences"), "text"))
def test_a_run_with_ones_own_validation_file(files, model, tmp_path, form):
    result = run(form, files, model, tmp_path, data__eval_source=files[form] / "valid.jsonl")
    evals = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row]
    assert evals[-1]["step"] == 2
    (held,) = evals[-1]["eval"].values()
    assert held["tokens"] > 0
    assert not evals[-1].get("eval_other")
    said = [row["message"] for row in rows(result.run_dir / "events.jsonl") if row["kind"] == "data"]
    assert any(text.startswith("held out: 1 file") and "15 of 15 documents" in text for text in said), said
    assert any("of 15 documents 5 are in the training data too" in text for text in said), said
    assert render(collect(result.run_dir))


@pytest.mark.parametrize("form", some(("text", "chat", "preferences"), "text"))
def test_a_run_that_holds_nothing_out(files, model, tmp_path, form):
    result = run(form, files, model, tmp_path)
    assert not [row for row in rows(result.run_dir / "metrics.jsonl") if row.get("eval")]
    assert render(collect(result.run_dir))


def test_the_loss_of_validation_conversations_is_that_of_a_plain_loop(files, model, tmp_path):
    how = {"data__eval_source": files["chat"] / "valid.jsonl", "train__micro_batch_size": 1, "data__seq_len": 256}
    result = run("chat", files, model, tmp_path, **how)
    evals = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row]
    (held,) = evals[0]["eval"].values()
    net = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    template = ChatTemplate.load(str(model), load_tokenizer(model))
    total, num = 0.0, 0
    for line in (files["chat"] / "valid.jsonl").read_text().splitlines():
        for sample in samples(template, json.loads(line)["messages"]):
            ids, trained = torch.tensor(sample.ids_T), torch.tensor(sample.trained_T)
            with torch.no_grad():
                logits = net(input_ids=ids[None]).logits[0, :-1].double()
            total += float(cross_entropy(logits[trained[1:]], ids[1:][trained[1:]], reduction="sum"))
            num += int(trained[1:].sum())
    assert held["tokens"] == num
    assert held["loss"] == pytest.approx(total / num, rel=64 * torch.finfo(torch.float32).eps * 16)


@pytest.mark.slow
def test_conversations_beside_the_held_out_part_are_read_as_conversations(files, model, tmp_path):
    how = {"data__eval_source": files["chat"] / "valid.jsonl", "data__holdout": 0.1}
    result = run("chat", files, model, tmp_path, **how)
    last = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row][-1]
    assert last["eval"]
    assert last["eval_other"]


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_step", [4, 8])
def test_preferences_beside_the_held_out_part_are_read_as_preferences(files, model, tmp_path, rows_per_step):
    """Their loss before the first step is log 2: the model is its own reference."""
    how = {"data__eval_source": files["preferences"] / "valid.jsonl", "data__holdout": 0.1}
    result = run("preferences", files, model, tmp_path, train__global_batch_size=rows_per_step, **how)
    first, *_, last = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row]
    (before,) = first["eval_other"].values()
    (after,) = last["eval_other"].values()
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert before["tokens"] == after["tokens"] > 0
    assert after["loss"] != before["loss"]
    assert render(collect(result.run_dir))


@pytest.mark.parametrize("other", [pytest.param("text", marks=pytest.mark.slow), "chat"])
def test_a_run_on_preferences_reads_other_data_as_what_they_are(files, model, tmp_path, other):
    how = {"data__eval_source": files[other] / "valid.jsonl", "data__holdout": 0.1}
    result = run("preferences", files, model, tmp_path, **how)
    last = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row][-1]
    (after,) = last["eval_other"].values()
    assert after["tokens"] > 20


@pytest.mark.parametrize("settings", [{"data.source": "installed"}, {"model.task": "image_classification"}])
def test_what_cannot_be_without_a_held_out_part_is_a_conflict(settings, tmp_path):
    with pytest.raises(ConfigError, match="need a held-out part"):
        load_recipe("default", {"data.holdout": "0"} | settings)
