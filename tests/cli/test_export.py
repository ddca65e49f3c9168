"""`export` end to end on a run that took a second: what is written, recorded, shown, and refused."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.cli.tuned import arguments, make_model, make_talks
from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run
from tilewright.cli.load_run import open_to_export, reopen
from tilewright.compress.export.targets import TARGETS, default_targets
from tilewright.compress.export_run import export_run, vocabulary_size
from tilewright.compress.exports_file import read_exports, write_exports
from tilewright.compress.graph.trace import converting
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prove.held_out import ask_held_out
from tilewright.compress.prove.proof import Proof
from tilewright.core.errors import CheckpointError, NumericsError
from tilewright.data.chat import sandbox
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.report.page import write_report
from tilewright.training.session import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    write_text(folder / "text")
    train(tiny(folder, folder / "runs", log__report="false"))
    return folder / "runs" / "tiny"


@pytest.fixture
def finished(trained, tmp_path):
    """A run of its own for each test; the data stays where it is."""
    return Path(shutil.copytree(trained, tmp_path / "tiny", symlinks=True))


def row(folder, target):
    return next(row for row in read_exports(folder)["artefacts"] if row["target"] == target)


@pytest.mark.slow
def test_runtimes_give_what_the_run_gives_beside_the_baselines(finished, capsys):
    assert run(["export", str(finished), "--to", "gguf-q8_0,hf", "--threads", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [found["state"] for found in record["baselines"]] == ["ran"] * 3
    assert record["baselines"][0]["kl"] < 1e-9
    assert record["baselines"][0]["log_prob_max"] < 1e-4
    for target, kl in (("hf", 1e-3), ("gguf-q8_0", 5e-3)):
        found = row(finished, target)
        assert found["state"] == "ran", found["reason"]
        assert found["kl"] < kl
        assert found["token_ids"]["equal"] == found["token_ids"]["documents"] > 5
        assert set(found["loss"]) == {"alpha", "beta"}
    assert record["machine"]["threads"] == 1
    assert row(finished, "hf")["runtime"].startswith("transformers 5")
    page = write_report(finished).read_text()
    for name in ("bf16 compiled", "transformers", "llama.cpp"):
        assert f">{name}<" in page


def test_llama_cpp_on_the_held_out_text_of_a_run(finished, tmp_path):
    given = open_to_export(finished)
    asked = ask_held_out(given.recipe, given.data, given.tokenizer, given.model, vocabulary_size(given))
    target = next(target for target in TARGETS if target.name == "gguf-f16")
    written = target.write(given, tmp_path / "model.gguf")
    (tmp_path / "proof").mkdir()
    proof = Proof(tmp_path / "proof", *asked[:2], 1, ConsumerLimits.of_this_machine(60), asked[2])
    found = proof.of(target.consumer.module, tmp_path / "model.gguf", written.options)
    assert found["state"] == "ran", found["reason"]
    assert found["kl"] < 1e-5
    assert found["odd_texts"]["equal"] == found["odd_texts"]["texts"] > 200
    assert found["answers"] > 50
    assert found["token_ids"]["equal"] == found["token_ids"]["documents"] > 5
    # The same rows by the run's own evaluation: of each domain the mean over the asked targets.
    question, expected, _ = asked
    for index, name in enumerate(expected.domains):
        with torch.no_grad():
            losses = [
                torch.nn.functional.cross_entropy(
                    given.model(torch.from_numpy(question.rows[at[0]])[None])[0, at[1]].double(),
                    torch.tensor(label),
                )
                for at, label, domain in zip(question.positions_N2, expected.labels_N, expected.domain_N, strict=True)
                if domain == index
            ]
        assert found["loss"][name]["fp32"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
        assert found["loss"][name]["consumer"] == pytest.approx(found["loss"][name]["fp32"], rel=1e-3)


def test_the_report_says_what_became_of_artefacts(finished):
    assert run(["export", str(finished), "--to", "gguf-q8_0,hf", "--no-proof"]) == 0
    page = write_report(finished).read_text()
    assert 'id="exports"' in page
    assert "not proven" in page
    assert "changed after its proof" not in page
    artefact = finished / row(finished, "gguf-q8_0")["path"]
    artefact.write_bytes(artefact.read_bytes()[:-1] + b"\7")
    shutil.rmtree(finished / row(finished, "hf")["path"])
    page = write_report(finished).read_text()
    assert "gguf-q8_0: the artefact was changed after its proof" in page
    assert "hf: the artefact is gone" in page


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1, "artefacts": [3, {"target": 5, "prefill_s": 3, "loss": []}]}']
)
def test_a_damaged_record_neither_stops_the_report_nor_the_next_export(finished, text):
    (finished / "exports.json").write_text(text)
    write_report(finished)
    assert run(["export", str(finished), "--to", "gguf-f16", "--no-proof"]) == 0
    assert row(finished, "gguf-f16")["bytes"] > 0


def test_weights_that_are_not_finite_are_refused(finished, tmp_path):
    given = open_to_export(finished)
    with torch.no_grad():
        given.model.lm_head.weight[3, 2] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        export_run(given, list(TARGETS), tmp_path / "out", prove=False)
    assert not (tmp_path / "out").exists()


def test_without_proof_everything_is_written_and_said_to_be_unproven(finished, tmp_path, capsys):
    every = ",".join(target.name for target in TARGETS if target.name.startswith(("hf", "fp8", "gguf")))
    assert run(["export", str(finished), "--to", every, "--no-proof", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "not proven" in shown
    record = read_exports(finished)
    assert {found["state"] for found in record["artefacts"]} == {"not proven"}
    assert record["baselines"] == []
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["tiny-bf16", "tiny-f16.gguf", "tiny-fp8", "tiny-q4_0.gguf", "tiny-q8_0.gguf"]
    for name in ("tiny-bf16", "tiny-fp8"):
        assert (tmp_path / "out" / name / "tokenizer.json").is_file()


def test_an_artefact_that_is_there_is_replaced_whole(finished):
    for _ in range(2):
        assert run(["export", str(finished), "--to", "hf,gguf-f16", "--no-proof", "-q"]) == 0
    assert sorted(path.name for path in (finished / "exports").iterdir()) == ["tiny-bf16", "tiny-f16.gguf"]
    assert len(read_exports(finished)["artefacts"]) == 2


def test_the_default_is_one_target_for_each_use(finished):
    chosen = default_targets(open_to_export(finished))
    assert [target.use for target in chosen] == ["training", "serving", "edge"]


def test_a_missing_runtime_is_named_with_its_extra(finished, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else real(name, *more))
    assert run(["export", str(finished), "--to", "gguf-f16,hf", "--no-proof"]) == 0
    assert row(finished, "gguf-f16")["state"] == "unavailable"
    assert "pip install 'tilewright[gguf]'" in row(finished, "gguf-f16")["reason"]
    assert run(["export", str(finished), "--to", "gguf-f16", "--no-proof"]) == 2
    assert "tilewright[gguf]" in capsys.readouterr().err


def test_a_run_that_has_not_finished_says_so(trained, tmp_path, capsys):
    other = Path(shutil.copytree(trained, tmp_path / "tiny"))
    recipe = (other / "run.toml").read_text()
    (other / "run.toml").write_text(recipe.replace("steps = 6 ", "steps = 99 "))
    assert run(["export", str(other), "--to", "gguf-f16", "--no-proof"]) == 0
    assert "at step 6 of 99; its newest checkpoint is exported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "said"), [("onnx-int3", "onnx-int3"), (",", "an empty list"), ("hf,ggfu-f16", "ggfu-f16")]
)
def test_a_target_that_is_none(finished, capsys, to, said):
    assert run(["export", str(finished), "--to", to]) == 2
    error = capsys.readouterr().err
    assert "No such export target" in error
    assert said in error


def test_an_output_folder_that_cannot_be_made(finished, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(["export", str(finished), "--to", "gguf-f16", "--no-proof", "--out", str(tmp_path / "file")]) == 2
    assert "Export cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").is_file()


def test_a_target_that_cannot_be_written_is_a_row_and_the_others_go_on(finished, tmp_path):
    def full(source, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def untraceable(source, path):
        with converting("Model cannot be traced into a graph", need="no branches"):
            raise KeyError("aten.frobnicate")

    by_name = {target.name: target for target in TARGETS}
    broken = [replace(by_name["gguf-f16"], write=full), replace(by_name["onnx"], write=untraceable)]
    given = open_to_export(finished)
    rows = export_run(given, [*broken, by_name["gguf-q8_0"]], tmp_path / "out", prove=False)["artefacts"]
    assert [found["state"] for found in rows] == ["failed", "failed", "not proven"]
    assert "No space left on device" in rows[0]["reason"]
    assert "aten.frobnicate" in rows[1]["reason"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-q8_0.gguf"]
    assert read_exports(finished)["artefacts"] == rows
    page = write_report(finished).read_text()
    assert "not written: Model cannot be traced into a graph" in page
    with pytest.raises(CheckpointError) as raised:
        export_run(given, broken, tmp_path / "out", prove=False)
    assert len(raised.value.problems) == 2


@pytest.mark.slow
def test_adapters_are_merged(tmp_path):
    """A fine-tuned Qwen3 with LoRA: the file has what the adapted model computes, and the chat template."""
    model = make_model(tmp_path / "model", "qwen3")
    talks = make_talks(tmp_path / "talks.jsonl")
    assert run(["finetune", str(model), str(talks), "--how", "lora", *arguments(tmp_path)]) == 0
    folder = tmp_path / "runs" / "tuned"
    given = open_to_export(folder)
    target = next(target for target in TARGETS if target.name == "gguf-f16")
    target.write(given, tmp_path / "tuned.gguf")
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(tmp_path / "tuned.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    ours = given.model.net.model.layers[0].self_attn.q_proj.weight
    stored = tensors["blk.0.attn_q.weight"]
    theirs = torch.from_numpy(np.array(dequantize(stored.data, stored.tensor_type)))
    assert (ours - theirs).abs().max() < 2**-10 * ours.abs().max()
    assert "<|im_start|>" in reader.fields["tokenizer.chat_template"].contents()


@pytest.mark.slow
def test_gptq_loses_less_than_rounding_in_llama_cpp(tmp_path):
    """A model that has learned its text, in blocks of 4 bits: llama.cpp's own distributions."""
    write_text(tmp_path / "text")
    options = {"train__steps": 150, "model__dim": 64, "optim__lr": 3e-3, "train__eval_interval": 0}
    folder = train(tiny(tmp_path, tmp_path / "runs", log__report="false", **options)).run_dir
    found = {}
    for method in ("rtn", "gptq"):
        assert run(["export", str(folder), "--to", "gguf-q4_0", "--method", method, "--threads", "1"]) == 0
        found[method] = row(folder, "gguf-q4_0")
        assert found[method]["state"] == "ran", found[method]["reason"]
    assert found["gptq"]["bytes"] == found["rtn"]["bytes"]
    assert found["gptq"]["formats"] == found["rtn"]["formats"]
    assert found["gptq"]["kl"] < found["rtn"]["kl"]
    assert any("by GPTQ" in note for note in found["gptq"]["notes"])
    print({method: each["kl"] for method, each in found.items()})


def test_rows_of_an_earlier_export_keep_what_they_were_measured_on(finished, capsys):
    assert run(["export", str(finished), "--to", "hf", "--threads", "1", "--no-proof"]) == 0
    record = read_exports(finished)
    assert record["artefacts"][0]["measured"]["threads"] == 1
    record["artefacts"][0]["state"] = "ran"
    record["artefacts"][0]["measured"] |= {"cpu": "another CPU", "date": "2020-01-01"}
    write_exports(finished, {name: value for name, value in record.items() if name != "format"})
    capsys.readouterr()
    assert run(["export", str(finished), "--to", "gguf-f16", "--threads", "1", "--no-proof"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "hf: kept from an earlier export, measured on another CPU" in shown
    assert "2020-01-01" in shown
    assert "gguf-f16: kept" not in shown


def test_a_prompt_of_a_run_is_that_of_its_merged_folder_in_transformers(trained, tmp_path):
    assert run(["merge", str(trained), "--out", str(tmp_path / "merged")]) == 0
    tokenizer = reopen(trained, "cpu").tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path / "merged")
    for text in ("alpha beta", "<|eos|> naïve 🦊<|bos|>", " \n"):
        ids = tokenizer.prompt_ids(text)
        assert ids == theirs(text)["input_ids"]
        assert ids[0] == tokenizer.bos_id
        assert tokenizer.encode(text) == load_tokenizer(trained / "tokenizer.json").encode(text)
    assert load_tokenizer(tmp_path / "merged").prompt_ids("a<|eos|>") == tokenizer.prompt_ids("a<|eos|>")


@pytest.mark.parametrize("template", ["{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2, "{% if %}"])
def test_a_template_that_takes_too_much_is_no_reason_to_lose_a_model(finished, template, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sandbox, "_CPU_S", 0.5)
    (finished / "chat_template.jinja").write_text(template)
    assert run(["merge", str(finished), "--out", str(tmp_path / "merged")]) == 0
    assert "ends no answer" in capsys.readouterr().err
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == template
    tokenizer = load_tokenizer(tmp_path / "merged")
    assert tokenizer.stop_ids == (tokenizer.eos_id,)
