"""`eval --tasks` end to end: a fine-tune and its base on local tasks, what is written, shown and refused."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cli.tuned import arguments, make_model, make_talks
from tests.integrations.harness import QUESTIONS, make_tasks
from tests.training.tiny import settings, write_text
from tilewright.cli.app import run
from tilewright.report.page import write_report
from tilewright.training.runlog import task_scores


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A fine-tune of all parameters, and the folder of the local tasks."""
    at = tmp_path_factory.mktemp("tuned")
    model, talks = make_model(at / "model", "llama"), make_talks(at / "talks.jsonl")
    assert run(["finetune", str(model), str(talks), "--how", "full", *arguments(at)]) == 0
    return at / "runs" / "tuned", make_tasks(at / "tasks")


def evaluate(tuned, *options):
    folder, tasks = tuned
    return run(["eval", str(folder), "--tasks", "local_choice,local_write", "--include-path", str(tasks), *options])


@torch.no_grad()
def accuracy(folder, tokenizer):
    """Of `local_choice`, in plain PyTorch."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(context, answer):
        start, ids = len(tokenizer.encode(context).ids), tokenizer.encode(context + answer).ids
        log_probs = net(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids)))

    picked = [max(range(3), key=lambda i, r=row: score(r["question"], " " + r["choices"][i])) for row in QUESTIONS]
    return sum(pick == row["answer"] for pick, row in zip(picked, QUESTIONS, strict=True)) / len(QUESTIONS)


def test_base_and_run_are_evaluated_recorded_and_shown(tuned, capsys):
    from tokenizers import Tokenizer

    folder, tasks = tuned
    assert evaluate(tuned) == 0
    captured = capsys.readouterr()
    table = [line.split() for line in captured.out.splitlines() if "local_" in line]
    assert [line[0] for line in table] == ["local_choice", "local_write"]
    assert "Traceback" not in captured.err
    rows = {(row.task, row.role): row for row in task_scores.read(folder)}
    assert len(rows) == 4
    tokenizer = Tokenizer.from_file(str(tasks.parent / "model" / "tokenizer.json"))
    assert rows["local_choice", "base"].value == accuracy(tasks.parent / "model", tokenizer)
    assert rows["local_choice", "run"].value == accuracy(folder / "hf", tokenizer)
    assert rows["local_choice", "run"].model.endswith("step_00000006")
    assert rows["local_choice", "base"].model == str(tasks.parent / "model")
    page = write_report(folder).read_text()
    section = page[page.index('<section id="tasks">') :]
    assert "local_write" in section
    assert f"{rows['local_choice', 'base'].value:.4f} ± {rows['local_choice', 'base'].stderr:.4f}" in section


@pytest.mark.slow
def test_other_conditions_replace_what_cannot_be_compared(tuned, capsys):
    folder, _ = tuned
    assert evaluate(tuned) == 0
    capsys.readouterr()
    assert evaluate(tuned, "--no-base", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["role"] for row in found["rows"]} == {"run"}
    assert len(task_scores.read(folder)) == 4  # the base's stay: the conditions are the same
    assert evaluate(tuned, "--no-base", "--limit", "2", "--num-fewshot", "1", "--apply-chat-template", "--quiet") == 0
    rows = task_scores.read(folder)
    assert [(row.role, row.conditions.samples, row.conditions.num_fewshot) for row in rows] == [("run", 2, 1)] * 2
    assert all(row.conditions.chat_template and row.conditions.limit == 2 for row in rows)


def test_a_run_from_random_weights_has_no_base(tuned, tmp_path, capsys):
    write_text(tmp_path / "text")
    given = settings(tmp_path, tmp_path / "runs", train__steps=2, train__compile="off", log__report="false")
    assert run(["train", *(part for name, value in given.items() for part in (f"--{name}", value))]) == 0
    folder = tmp_path / "runs" / "tiny"
    options = ["--tasks", "local_choice", "--include-path", str(tuned[1])]
    assert run(["eval", str(folder), *options, "--base"]) == 2
    assert "No base model" in capsys.readouterr().err
    assert run(["eval", str(folder), *options]) == 0
    (row,) = task_scores.read(folder)
    assert (row.role, row.conditions.samples) == ("run", 4)


def test_a_folder_is_evaluated_without_a_run(tuned, capsys):
    folder, tasks = tuned
    assert evaluate(tuned, "--json") == 0
    of_run = {row["task"]: row for row in json.loads(capsys.readouterr().out)["rows"] if row["role"] == "base"}
    assert evaluate((tasks.parent / "model", tasks), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] is None
    assert {row["task"]: row["value"] for row in found["rows"]} == {task: row["value"] for task, row in of_run.items()}
    bare = make_model(folder.parent / "bare", "qwen3", template=False)
    assert evaluate((bare, tasks), "--apply-chat-template") == 2
    assert "no chat template" in capsys.readouterr().err
    assert evaluate((bare, tasks)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["local_choice", "local_write"]


def test_what_is_wrong_is_told(tuned, monkeypatch, capsys):
    folder, _ = tuned
    for options, said in (
        (["--limit", "3"], "--limit needs --tasks"),
        (["--no-base"], "--base needs --tasks"),
        (["--tasks", " , "], "needs the name of a task"),
        (["--tasks", "local_choice", "--batches", "1"], "one of them"),
        (["--tasks", "local_choice", "--include-path", str(folder / "nowhere")], "No folder of tasks"),
    ):
        assert run(["eval", str(folder), *options]) == 2
        assert said in capsys.readouterr().err
    (folder / "tasks.json").write_text("{")
    assert evaluate(tuned) == 2
    assert "Unreadable file of task results" in capsys.readouterr().err
    assert "tasks.json cannot be read" in write_report(folder).read_text()
    (folder / "tasks.json").unlink()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(tuned) == 5
    assert "pip install 'tilewright[eval]'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_task_gets_a_suggestion(tuned, capsys):
    assert run(["eval", str(tuned[0]), "--tasks", "hellaswagg"]) == 2
    assert "--tasks hellaswag" in capsys.readouterr().err
