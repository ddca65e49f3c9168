"""A path of data that is missing, empty or without a file that is read: the advice is of use to the command."""

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.tuned import make_model
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.data.prepare import prepare

TALK = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes!"}]}
PAIR = {"prompt": "hello", "chosen": "Yes!", "rejected": "No."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture
def path(request, tmp_path):
    """A path that nothing can be read from, of the kind that is asked for."""
    root = tmp_path / "data"
    if request.param == "missing":
        return root / "absent.jsonl"
    root.mkdir()
    if request.param == "binary":
        (root / "a.bin").write_bytes(bytes(range(256)) * 9)
        (root / "b.jsonl").write_bytes(b"")
    return root


def vision(folder):
    """The configuration of a small model of images."""
    config = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 32}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ViTForImageClassification"]}))
    return folder


def command_of(use, path, model, tmp_path):
    """The command that reads `path` for a use, and settings of a run that ends early in any case."""
    chat = [f"--model.path={model}", f"--data.cache_dir={tmp_path / 'cache'}", f"--run.dir={tmp_path / 'runs'}"]
    text = [f"--data.cache_dir={tmp_path / 'cache'}", f"--run.dir={tmp_path / 'runs'}"]
    vit = vision(tmp_path / "vit")
    images = [f"--model.path={vit}", "--model.task=image_classification", "--model.kind=hf", "--data.image_size=32"]
    if use == "build":
        (tmp_path / "data.toml").write_text(f'[read]\nsource = "{path}"\n')
        return ["data", "build", str(tmp_path / "data.toml"), "--out", str(tmp_path / "built")]
    if use == "finetune":
        return ["finetune", str(model), str(path), *chat[1:]]
    if use == "finetune two":
        good = tmp_path / "good.jsonl"
        good.write_text(json.dumps(TALK) + "\n")
        return ["finetune", str(model), str(good), str(path), *chat[1:]]
    return {
        "text": ["train", "cpu_10m", f"--data.source={path}", *text],
        "dry run": ["train", "cpu_10m", "--dry-run", f"--data.source={path}", *text],
        "chat": ["train", "sft_lora", f"--data.source={path}", *chat],
        "preferences": ["train", "dpo", f"--data.source={path}", *chat],
        "images": ["train", "fp32", *images, f"--data.source={path}", *text],
        "precision": ["precision", "search", "cpu_10m", f"--data.source={path}", *text],
    }[use]


USES = ("text", "dry run", "chat", "preferences", "images", "precision", "build", "finetune", "finetune two")
OF_TEXT = ("text", "dry run", "precision", "build")
NOUNS = {
    "finetune": "conversation",
    "finetune two": "conversation",
    "chat": "conversation",
    "preferences": "preferences",
    "images": "images",
    "build": "file",
}


@pytest.mark.parametrize("path", ["missing", "empty", "binary"], indirect=True)
@pytest.mark.parametrize("use", USES)
def test_the_hint_fits_what_the_command_can_use(use, path, model, tmp_path, capsys):
    assert run(command_of(use, path, model, tmp_path)) == 2
    said = capsys.readouterr().err
    assert all(f"  {part}" in said for part in ("got", "need", "try")), said
    assert path.name in said, said
    assert ("installed" in said) == (use in OF_TEXT), said
    assert NOUNS.get(use, "text") in said, said
    assert "Traceback" not in said


@pytest.mark.parametrize("use", ["finetune", "text", "chat", "preferences", "build"])
def test_a_slip_in_a_name_is_pointed_at(use, model, tmp_path, capsys):
    (tmp_path / "conversations.jsonl").write_text(json.dumps(TALK) + "\n")
    assert run(command_of(use, tmp_path / "conversation.jsonl", model, tmp_path)) == 2
    assert f"try    {tmp_path / 'conversations.jsonl'}" in capsys.readouterr().err


def settings_in(said):
    """What is to be pasted, of the part `try` of an error."""
    line = next(line for line in said.splitlines() if line.startswith("  try"))
    name, _, value = line.removeprefix("  try").partition("   (")[0].strip().partition(" = ")
    return {name: json.loads(value)}


@pytest.mark.parametrize(
    ("format", "file", "content", "better"),
    [
        ("text", "a.jsonl", json.dumps(TALK), "chat"),
        ("text", "a.jsonl", json.dumps({"conversations": []}), "chat"),
        ("text", "a.csv", "instruction,output\nAdd.,2", "chat"),
        ("text", "a.jsonl", json.dumps(PAIR), "preferences"),
        ("chat", "a.jsonl", json.dumps(PAIR), "preferences"),
        ("chat", "a.txt", "plain text", "text"),
        ("chat", "a.jsonl", json.dumps({"text": "plain text"}), "text"),
        ("preferences", "a.jsonl", json.dumps(TALK), "chat"),
        ("preferences", "a.md", "plain text", "text"),
    ],
)
def test_data_of_another_format_are_named_as_such(format, file, content, better, model, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / file).write_text(content + "\n")
    recipe = {"text": "cpu_10m", "chat": "sft_full", "preferences": "dpo"}[format]
    settings = [f"--data.source={folder}", f"--data.cache_dir={tmp_path / 'cache'}", f"--run.dir={tmp_path / 'runs'}"]
    settings += [f"--model.path={model}"] * (format != "text")
    assert run(["train", recipe, *settings]) == 2
    said = capsys.readouterr().err
    assert settings_in(said) == {"data.format": better}, said
    if better == "text":
        return
    load_recipe(recipe, [*settings, f"--data.format={better}"])  # is accepted when pasted


def test_validation_and_other_text_name_their_setting(model, tmp_path, capsys):
    good = tmp_path / "talks.jsonl"
    good.write_text("".join(json.dumps(TALK | {"id": i}) + "\n" for i in range(9)))
    settings = ["--data.eval_source=absent", f"--data.cache_dir={tmp_path / 'cache'}", f"--run.dir={tmp_path / 'runs'}"]
    assert run(["finetune", str(model), str(good), "--data.holdout=0", *settings]) == 2
    said = capsys.readouterr().err
    assert "where  data.eval_source" in said
    assert settings_in(said) == {"data.holdout": 0.02}, said


def test_a_missing_data_toml_is_made_by_the_command_that_is_named(tmp_path, capsys):
    file = tmp_path / "a folder" / "mine.toml"
    file.parent.mkdir()
    assert run(["data", "build", str(file)]) == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("  try"))
    words = shlex.split(line.removeprefix("  try"))
    assert Path(words[-1]) == file


def test_the_library_names_what_it_was_asked_for(tmp_path):
    for format, word in (("text", "training data"), ("chat", "conversations"), ("preferences", "pairs of preferences")):
        with pytest.raises(Exception, match=f"No {word} at this path"):
            prepare(str(tmp_path / "absent"), format=format, cache_dir=str(tmp_path))
