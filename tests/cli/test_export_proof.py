"""What `export` proves and says: damage is exit code 4, artefacts of one run agree, integers are those of training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from tests.cli.tuned import make_model
from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run
from tilewright.cli.load_run import open_to_export
from tilewright.compress.export import targets
from tilewright.compress.exports_file import read_exports
from tilewright.compress.prove.held_out import ask_held_out
from tilewright.core.errors import DataError
from tilewright.report.page import write_report
from tilewright.training.components.recipe_data import HeldOut
from tilewright.training.session import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export-proof")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def trained(data):
    train(tiny(data, data / "runs", log__report="false"))
    return data / "runs" / "tiny"


@pytest.fixture
def finished(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "tiny", symlinks=True))


@pytest.fixture
def _quick(monkeypatch):
    """Baselines are what `test_export` looks at."""
    monkeypatch.setattr("tilewright.compress.export_run.BASELINES", ())


def row(folder, target):
    return next(row for row in read_exports(folder)["artefacts"] if row["target"] == target)


def swapped(write):
    """A target's `write`, and after it the halves of a matrix in each other's place."""

    def damaged(source, path):
        written = write(source, path)
        reader = gguf.GGUFReader(path, "r+")
        values = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data
        half = len(values) // 2
        values[: 2 * half] = values[list(range(half, 2 * half)) + list(range(half))]
        reader.data.flush()
        return written

    return damaged


@pytest.mark.usefixtures("_quick")
def test_damage_is_an_exit_code_a_state_and_a_bad_badge(finished, capsys, monkeypatch):
    broken = [
        replace(target, write=swapped(target.write)) if target.name == "gguf-f16" else target
        for target in targets.TARGETS
    ]
    monkeypatch.setattr(targets, "TARGETS", tuple(broken))
    assert run(["export", str(finished), "--to", "gguf-f16", "--threads", "1"]) == 4
    shown = capsys.readouterr()
    assert "gguf-f16 is not the model that it was made of" in shown.err
    for part in ("got", "need", "try"):
        assert f"\n  {part} " in shown.err
    found = row(finished, "gguf-f16")
    assert found["state"] == "failed"
    assert "KL" in found["reason"]
    assert found["kl"] > 1e-4
    page = write_report(finished).read_text()
    assert "state state-bad" in page
    assert "state state-good" not in page
    monkeypatch.undo()


@pytest.mark.usefixtures("_quick")
def test_the_folder_and_the_file_of_one_run_begin_texts_alike(finished):
    """A model that was trained here: its documents began with the begin token."""
    assert run(["export", str(finished), "--to", "hf,gguf-f16", "--threads", "1"]) == 0
    for target in ("hf", "gguf-f16"):
        assert row(finished, target)["state"] == "ran"
    folder = finished / row(finished, "hf")["path"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a b")["input_ids"]
    assert ids == [tokenizer.bos_token_id, *tokenizer("a b", add_special_tokens=False)["input_ids"]]
    assert tokenizer.model_max_length == 32
    fields = gguf.GGUFReader(finished / row(finished, "gguf-f16")["path"]).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents()
    assert fields["llama.context_length"].contents() == 32
    assert row(finished, "gguf-f16")["stored"]["kl"] < 1e-5


@pytest.mark.usefixtures("_quick")
@pytest.mark.slow
def test_a_chat_model_that_trains_on_text_keeps_template_and_length(data, tmp_path):
    model = make_model(tmp_path / "model", "qwen3")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 200, "padding_side": "left"}))
    changes = {"model__kind": "hf", "model__path": model, "model__weights": "load"}
    changes |= {"train__steps": 1, "checkpoint__export_hf": "true"}
    folder = train(tiny(data, tmp_path / "runs", log__report="false", **changes)).run_dir
    assert run(["export", str(folder), "--to", "hf,gguf-f16", "--threads", "1"]) == 0
    before = transformers.AutoTokenizer.from_pretrained(model)
    talk = [{"role": "user", "content": "hello"}]
    for path in (folder / "hf", folder / row(folder, "hf")["path"]):
        after = transformers.AutoTokenizer.from_pretrained(path)
        assert after.apply_chat_template(talk, tokenize=False) == before.apply_chat_template(talk, tokenize=False)
        assert (after.model_max_length, after.padding_side) == (200, "left")
        assert after("hello you")["input_ids"] == before("hello you")["input_ids"]
    fields = gguf.GGUFReader(folder / row(folder, "gguf-f16")["path"]).fields
    assert fields["tokenizer.chat_template"].contents() == before.chat_template
    assert fields["qwen3.context_length"].contents() == 256
    assert not fields["tokenizer.ggml.add_bos_token"].contents()


@pytest.mark.usefixtures("_quick")
@pytest.mark.slow
def test_a_run_in_integers_is_compared_with_what_it_was_trained_as(data, tmp_path):
    rules = '[{compute = "int4"}]'
    changes = {"train__steps": 30, "model__dim": 64, "optim__lr": 3e-3, "precision__rules": rules}
    folder = train(tiny(data, tmp_path / "runs", log__report="false", **changes)).run_dir
    assert run(["export", str(folder), "--to", "gguf-q4_0,gguf-f16", "--threads", "1"]) == 0
    four, sixteen = row(folder, "gguf-q4_0"), row(folder, "gguf-f16")
    assert four["compared_with"] == "the model as trained"
    assert four["kl"] == pytest.approx(four["stored"]["kl"], rel=1e-3), "the codes are those of training"
    source = open_to_export(folder)
    question = ask_held_out(source.recipe, source.data, source.tokenizer, source.model, 300)
    trained = ask_held_out(source.recipe, source.data, source.tokenizer, source.as_trained, 300)
    p, q = trained[1].log_probs_NV, question[1].log_probs_NV
    apart = float((np.exp(p) * (p - q)).sum(1).mean())
    print("as trained", four["kl"], "unrounded", apart)
    assert four["kl"] < 0.2 * apart
    assert sixteen["compared_with"] == "unrounded weights"
    assert any("unrounded weights" in note for note in sixteen["runtime_notes"])
    assert sixteen["kl"] < 1e-5


# ---- nothing to prove on ----


@pytest.mark.parametrize("batches", [{}, {"alpha": []}, {"alpha": [], "beta": []}], ids=str)
def test_no_held_out_text_is_an_error_in_four_parts(finished, monkeypatch, batches):
    source = open_to_export(finished)
    monkeypatch.setattr("tilewright.compress.prove.held_out.held_out", lambda *_: HeldOut(batches, {}))
    with pytest.raises(DataError, match="No held-out text") as error:
        ask_held_out(source.recipe, source.data, source.tokenizer, source.model, 300)
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_, problem.where))
