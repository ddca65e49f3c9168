"""Runs that are not as most: with rows of whole documents, one held-out row, integers, that never resume or that are
still trained."""

import json
from dataclasses import replace

import pytest

from tests.optim.test_citizen import assert_in_words
from tests.training.test_sft import make_model, talks
from tests.training.tiny import tiny, write_text
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.compress_run import Compression
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.held_out_rise import row_losses_of
from tilewright.compress.budget.stage_runs import run_stage, stage_recipe, write_model
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.sections.precision import PrecisionRule
from tilewright.core.errors import CheckpointError
from tilewright.report.pages.compress_page import render_compression
from tilewright.training.session import train

SHAPE = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__ffn_dim": 64, "precision__mode": "fp32"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    write_text(folder / "text")
    options = {"train__steps": 4, "log__report": False}
    return train(tiny(folder, folder / "runs", **SHAPE, **options)).run_dir


def asked(source, out):
    settings = CompressSettings.of("500%", "hf", "ffn", steps=1, tries=1, controls="none", batches=1)
    return Compression(source, settings, out, open_to_export, lambda text: None)


def with_settings(source, values):
    return replace(source, recipe=changed(source.recipe, values))


@pytest.mark.parametrize("resume", ["auto", "never", "required"])
@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_stages_go_with_the_settings_of_any_run(resume, rows, run, tmp_path):
    """They begin, or continue, whatever the run does; no tokens of rows that come once are kept."""
    source = with_settings(open_to_export(run), {"checkpoint.resume": resume, "data.rows": rows})
    write_model(source, source.model, tmp_path / "whole")
    recipe = stage_recipe(source, "stage", tmp_path, folder=tmp_path / "whole", taught=True, steps=3)
    assert not conflicts(recipe)
    assert recipe.checkpoint.resume == "auto"
    assert recipe.distill.teacher
    assert bool(recipe.distill.cache) == (rows == "packed")


def test_one_held_out_row_has_no_error_and_says_so(run, tmp_path):
    """The record has null then, which a second command reads, and the page."""
    source = with_settings(open_to_export(run), {"train.micro_batch_size": 1, "train.eval_batches": 1})
    first = asked(source, tmp_path)
    first.batches = {"alpha": first.batches["alpha"]}
    first.stored = first.whole = row_losses_of(first.model, first.batches)
    names = [plan.name for plan in first.plan()]
    again = asked(source, tmp_path)
    assert [row["error"] for row in again.record["sensitivity"]] == [None]
    assert [plan.name for plan in again.plan()] == names
    row = {"name": names[0], "parameters": 1, "rise_before": 0.0, "rise": 0.0, "error": None, "kept": {}, "units": {}}
    row |= {"equal_rise": 0.1, "equal_error": None, "predicted_speed": 0.9, "speed": 1.0}
    row |= {"seconds": {"predicted": 0.0011, "measured": 0.002}, "domains": again.record["domains"]}
    page = render_compression(again.record | {"recovered": {names[0]: row}})
    assert page.count('<td class="no">unknown</td>') == 4  # a sensitivity, a plan, and both rises of the cut


def test_a_run_with_integers_is_measured_as_it_was_trained(run, tmp_path):
    """The rise of what recovery trains with integers is over the run with them; cuts before it are not rounded, and
    are compared with weights that are not either."""
    rule = PrecisionRule.model_validate({"compute": "int4"})
    source = with_settings(open_to_export(run), {"precision.rules": (rule,)})
    found = asked(source, tmp_path)
    assert found.record["loss"] == found.whole.loss == row_losses_of(source.as_trained, found.batches).loss
    assert found.stored.loss == row_losses_of(source.model, found.batches).loss != found.whole.loss


def test_a_teacher_that_is_still_trained_is_refused(run, tmp_path):
    """Its newest checkpoint would teach, another one in each stage."""
    source = open_to_export(run)
    earlier = replace(source, checkpoint=source.checkpoint.with_name("step_00000002"))
    write_model(source, source.model, tmp_path / "whole")
    recipe = stage_recipe(source, "stage", tmp_path, folder=tmp_path / "whole", taught=True, steps=1)
    with pytest.raises(CheckpointError, match="trained further") as error:
        run_stage(recipe, earlier)
    assert_in_words(error.value, source.checkpoint.name, "step_00000002", "new --out")
    assert not (tmp_path / "stage").exists()


def test_conversations_of_a_stage_have_the_template_of_the_run(tmp_path):
    """It came with the weights that the run loaded; what is cut has it, and ends answers alike: data are the same."""
    (tmp_path / "chats").mkdir()
    rows = "".join(json.dumps({"messages": messages}) + "\n" for messages in talks(60))
    (tmp_path / "chats" / "a.jsonl").write_text(rows)
    options = {"model__path": make_model(tmp_path / "llama"), "model__weights": "load", "data__format": "chat"}
    options |= {"data__source": tmp_path / "chats", "data__seq_len": 128, "precision__mode": "fp32"}
    source = open_to_export(
        train(tiny(tmp_path, tmp_path / "runs", **options, train__steps=2, log__report=False)).run_dir
    )
    found = asked(source, tmp_path / "out")
    row = found._recovered(found.plan()[0])
    stage = open_to_export(tmp_path / "out" / row["run"])
    assert stage.data.fingerprint == source.data.fingerprint
    assert stage.text_rules == source.text_rules
    assert stage.tokenizer.stop_ids == source.tokenizer.stop_ids
