"""Starting is fast: `import tilewright` and `--help` import neither torch nor pydantic."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "pydantic", "transformers", "rich")


def loaded_modules(code: str) -> set[str]:
    """The heavy packages that are imported after `code` ran in a fresh process."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.splitlines()[-1].split())


def test_import_is_light():
    assert loaded_modules("import tilewright; dir(tilewright); tilewright.__version__") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_is_light(arguments):
    assert loaded_modules(f"from tilewright.cli.app import run; assert run({arguments!r}) == 0") == set()


def test_help_answers_in_half_a_second():
    """Of a processor, which other processes do not lengthen; it waits for nothing."""
    seconds = []
    for _ in range(3):
        start = _children_s()
        subprocess.run([sys.executable, "-m", "tilewright", "--help"], capture_output=True, check=True)
        seconds.append(_children_s() - start)
    assert min(seconds) < 0.5


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_mistake_in_a_recipe_is_told_before_torch_is_imported():
    code = "from tilewright.cli.app import run; assert run(['train', '--train.stesp', '3']) == 2"
    assert "torch" not in loaded_modules(code)


@pytest.mark.parametrize(
    "command",
    [
        *(["chat"], ["serve"], ["compress"], ["search"], ["eval"], ["eval", "nothing"], ["eval", "--tasks", "piqa"]),
        *(["generate", "--prompt", "a"], ["export", "--to", "onnx"], ["report"], ["watch"]),
    ],
)
def test_a_run_that_is_not_there_is_told_before_torch_is_imported(command, tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r}); from tilewright.cli.app import run; assert run({command!r}) == 2"
    assert "torch" not in loaded_modules(code)


PATHS = {
    "data": ["--data.source", "nowhere"],
    "rows": ["--data.source", "nowhere.jsonl", "--data.format", "chat"],
    "one of several": ["--data.sources", '{ a = "nowhere" }'],
    "images": ["--data.source", "nowhere", "--model.task", "image_classification", "--model.kind", "hf"],
    "validation": ["--data.eval_source", "nowhere", "--data.source", ".", "--data.holdout", "0"],
    "other text": ["--data.eval_source", "nowhere"],
    "tokenizer": ["--data.tokenizer", "nowhere"],
    "template": ["--data.source", ".", "--data.format", "chat", "--data.chat_template", "nowhere.jinja"],
    "model": ["--model.path", "nowhere"],
    "loaded model": ["--model.path", "./nowhere", "--model.kind", "hf", "--model.weights", "load"],
    "teacher": ["--distill.teacher", "nowhere"],
    "plan": ["--memory.plan", "nowhere"],
}
"""Settings that name something that is not there."""


@pytest.mark.parametrize("settings", PATHS.values(), ids=PATHS)
def test_a_path_that_is_not_there_is_said_before_torch_is_imported(settings, tmp_path):
    """In the four parts of an error, once, and before there is a run folder."""
    (tmp_path / "config.json").write_text("{}")
    model = ["--model.path", "."] if "image_classification" in settings else []
    command = ["train", "--run.name", "a", *settings, *model]
    code = f"import os; os.chdir({str(tmp_path)!r}); from tilewright.cli.app import run; assert run({command!r}) == 2"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('torch' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.splitlines()[-1] == "False"
    assert result.stderr.count("tilewright: ") == 1
    assert "nowhere" in result.stderr
    assert all(f"\n  {part}" in result.stderr for part in ("where", "got", "need", "try"))
    assert not (tmp_path / "runs").exists()


def test_a_plan_file_that_is_not_text_is_told_before_torch_is_imported(tmp_path):
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    command = ["train", "--memory.plan", str(tmp_path / "plan.toml")]
    assert "torch" not in loaded_modules(f"from tilewright.cli.app import run; assert run({command!r}) == 2")


def test_a_report_needs_no_torch():
    """Nor does the download of `watch`, a process for each: they read records of a run."""
    code = "import tilewright.report.page, tilewright.report.watch.export, tilewright.cli.commands.outputs.report"
    assert "torch" not in loaded_modules(code)


LATER = ("torch._dynamo", "transformers", "tilewright.ops.backends.triton.launch")


def test_a_plan_of_a_decoder_imports_neither_torchs_compiler_nor_transformers():
    """They take seconds, and a plan for a GPU that is not there needs nothing of them."""
    code = "from tilewright.cli.app import run; assert run(['plan', 'slice_cpu', '--on', 'h200']) == 0"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint([name for name in {LATER!r} if name in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"
