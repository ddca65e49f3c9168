"""The loader: precedence and sources, every problem at once, strict types, and a round trip of what it writes."""

import itertools
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.config import setting_names
from tilewright.core.config.change_recipe import accepted, changed, with_settings
from tilewright.core.config.load import load_recipe, shipped_recipes, write_run_toml
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(path, overrides=(), environ=None):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides, environ or {})
    return caught.value.problems


# --- precedence and sources -------------------------------------------------------------------------------------------


def test_without_a_file_everything_is_the_default():
    loaded = load_recipe(None, environ={})
    assert loaded.recipe == Recipe()
    assert set(loaded.sources.values()) == {"default"}
    assert set(loaded.sources) == {field.path for field in setting_names.fields()}
    assert loaded.name == "default"


def test_command_line_beats_environment_beats_file_beats_parent_beats_default(tmp_path):
    write(tmp_path, "parent.toml", "[train]\nsteps = 1\nglobal_batch_size = 11\nlog_interval = 7\neval_batches = 9\n")
    child = write(
        tmp_path,
        "child.toml",
        'extends = "parent.toml"\n[train]\nsteps = 2\nglobal_batch_size = 12\nlog_interval = 8\n',
    )
    environ = {"TILEWRIGHT_TRAIN_STEPS": "3", "TILEWRIGHT_TRAIN_GLOBAL_BATCH_SIZE": "13"}
    loaded = load_recipe(child, ["--train.steps", "4"], environ)
    train = loaded.recipe.train
    assert (train.steps, train.global_batch_size, train.log_interval, train.eval_batches, train.micro_batch_size) == (
        4,
        13,
        8,
        9,
        8,
    )
    assert [
        loaded.sources[f"train.{name}"]
        for name in ("steps", "global_batch_size", "log_interval", "eval_batches", "micro_batch_size")
    ] == ["cli", "env TILEWRIGHT_TRAIN_GLOBAL_BATCH_SIZE", "file child.toml", "extends parent.toml", "default"]


def test_a_chain_of_parents_is_nearest_first(tmp_path):
    write(tmp_path, "a.toml", "[train]\nsteps = 1\nlog_interval = 1\n")
    write(tmp_path, "b.toml", 'extends = "a.toml"\n[train]\nsteps = 2\n')
    loaded = load_recipe(write(tmp_path, "c.toml", 'extends = "b.toml"\n'), environ={})
    assert (loaded.recipe.train.steps, loaded.recipe.train.log_interval) == (2, 1)
    assert loaded.sources["train.steps"] == "extends b.toml"


def test_extends_names_a_shipped_recipe_from_anywhere(tmp_path):
    loaded = load_recipe(write(tmp_path, "mine.toml", 'extends = "default"\n'), environ={})
    assert loaded.recipe == load_recipe("default", environ={}).recipe
    assert loaded.name == "mine"


def test_a_run_folders_recipe_is_named_after_the_folder(tmp_path):
    (tmp_path / "first").mkdir()
    assert load_recipe(write(tmp_path / "first", "run.toml", ""), environ={}).name == "first"


@pytest.mark.parametrize("arguments", [["--train.steps", "10"], ["--train.steps=10"], {"train.steps": "10"}])
def test_forms_of_an_override(arguments):
    assert load_recipe(None, arguments, {}).recipe.train.steps == 10


def test_overrides_are_toml_values_typed_by_the_schema():
    arguments = [
        "--run.name",
        "7",
        "--precision.mode",
        "fp32",
        "--data.max_bytes",
        "2MiB",
        "--checkpoint.export_hf",
        "True",
    ]
    arguments += ["--data.domains", '["code", "prose"]', "--data.weights", "{ code = 2 }", "--optim.lr=1e-4"]
    arguments += ["--precision.rules", '[{ match = "*.o_proj", compute = "fp32" }]', "--precision.loss_scale", "1024"]
    recipe = load_recipe(None, arguments, {}).recipe
    assert recipe.run.name == "7"
    assert recipe.data.max_bytes == 2 * 2**20
    assert recipe.checkpoint.export_hf is True
    assert recipe.data.domains == ("code", "prose")
    assert recipe.data.weights == {"code": 2.0}
    assert recipe.optim.lr == 1e-4
    assert recipe.precision.rules[0].compute == "fp32"
    assert recipe.precision.loss_scale == 1024.0


def test_none_takes_a_parents_optional_setting_away(tmp_path):
    child = write(tmp_path, "c.toml", 'extends = "tf32_then_bf16"\n[precision]\nstart_mode = "none"\n')
    assert load_recipe(child, environ={}).recipe.precision.start_mode is None
    assert load_recipe("tf32_then_bf16", ["--precision.start_mode", "none"], {}).recipe.precision.start_mode is None


# --- bad input --------------------------------------------------------------------------------------------------------

FIVE_MISTAKES = """\
[train]
steps = "7"
lrr = 3
[precison]
mode = "hybrid"
[precision]
mode = "fp8"
[optim]
betas = [1, 2, 3]
"""


def test_five_mistakes_are_reported_at_once_with_their_lines(tmp_path):
    path = write(tmp_path, "bad.toml", FIVE_MISTAKES)
    found = problems(path)
    assert [problem.where for problem in found] == [f"{path}:{line}" for line in (2, 3, 4, 7, 9)]
    assert [problem.what for problem in found] == [
        "train.steps is not right",
        "Unknown setting train.lrr",
        "Unknown section [precison]",
        "precision.mode is not right",
        "optim.betas is not right",
    ]
    assert found[0].got == '"7"'
    assert found[0].need == "an integer, at least 0, at most 2147483647"
    assert found[1].try_ == "did you mean optim.lr?"
    assert found[2].try_ == "did you mean [precision]?"
    assert found[3].need.startswith('one of "fp32", "tf32", "bf16_mixed", "pure_fp16", "hybrid", "fp8_tile"')
    assert "did you mean" not in found[3].try_
    assert found[4].need == "a list of 2 numbers"


def test_mistakes_of_all_sources_come_together(tmp_path):
    path = write(tmp_path, "bad.toml", "[train]\nsteps = 0\n")
    found = problems(path, ["--train.stesp", "4", "--optim.lr", "fast"], {"DEEPSEEK_AMP_ENABLED": "maybe"})
    assert {problem.where for problem in found} == {
        f"{path}:2",
        "--train.stesp on the command line",
        "--optim.lr on the command line",
        "environment variable DEEPSEEK_AMP_ENABLED",
    }


def test_a_conflict_is_left_out_where_its_fields_are_wrong_already(tmp_path):
    path = write(tmp_path, "bad.toml", '[train]\nglobal_batch_size = "x"\nmicro_batch_size = 99\n')
    assert [problem.what for problem in problems(path)] == ["train.global_batch_size is not right"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("steps = 5\n", "steps is outside any section"),
        ("train = 5\n", "train is a section, not a value"),
        ("[train]\nsteps = true\n", "train.steps is not right"),
        ("[train]\nsteps = 2.5\n", "train.steps is not right"),
        ("[run]\nseed = -1\n", "run.seed is not right"),
        ("[run]\nname = 3\n", "run.name is not right"),
        ("[checkpoint]\nasync_save = 1\n", "checkpoint.async_save is not right"),
        ("[optim]\nlr = inf\n", "optim.lr is not right"),
        ("[optim]\nlr = nan\n", "optim.lr is not right"),
        ("[data]\nmax_bytes = 1.5\n", "data.max_bytes is not right"),
        ('[data]\nmax_bytes = "24MX"\n', "data.max_bytes is not right"),
        ("[data]\nseq_len = 2024-01-01\n", "data.seq_len is not right"),
        ('[precision]\nrules = [{ match = "a" }]\n', "Precision rule without a format"),
        ('[precision]\nrules = [{ compute = "fp32", mach = "a" }]\n', "unknown key 'mach' in precision.rules"),
        ("extends = 3\n", "`extends` is not the name of one recipe"),
        ('extends = "nowhere"\n', "No such recipe"),
    ],
)
def test_bad_values(tmp_path, text, what):
    found = problems(write(tmp_path, "bad.toml", text))
    assert [problem.what for problem in found] == [what]


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("[train]\nsteps = 5\nmode = bf16\n", 3, 'mode = "bf16"'),
        ("[train\nsteps = 5\n", 1, "texts in quotes"),
        ("[train]\nsteps = 5\nsteps = 6\n", 3, "texts in quotes"),
    ],
)
def test_a_syntax_error_has_four_parts_and_a_line(tmp_path, text, line, hint):
    path = write(tmp_path, "bad.toml", text)
    (problem,) = problems(path)
    assert problem.what == "Recipe is not valid TOML"
    assert problem.where == f"{path}:{line}"
    assert problem.got
    assert problem.need
    assert hint in problem.try_


def test_a_circle_of_parents(tmp_path):
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    path = write(tmp_path, "b.toml", '\nextends = "a.toml"\n')
    (problem,) = problems(path)
    assert problem.got == "b.toml -> a.toml -> b.toml"


def test_files_that_are_not_there_or_not_text(tmp_path):
    (problem,) = problems("deflt")
    assert problem.try_ == "did you mean default?"
    assert ", ".join(shipped_recipes()) in problem.need
    (problem,) = problems(tmp_path)
    assert problem.what == "Recipe is a file, not a folder"
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (problem,) = problems(tmp_path / "binary.toml")
    assert problem.what == "Recipe is not UTF-8 text"
    assert "0xff at position 0" in problem.got


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["--stesp", "4"], "Unknown setting stesp", "did you mean train.steps?"),
        (["--train.steps"], "--train.steps has no value", "--train.steps VALUE"),
        (["--train.steps", "--run.seed", "1"], "--train.steps has no value", "--train.steps VALUE"),
        (["--trian.steps"], "Unknown option --trian.steps", "--train.steps VALUE"),
        (["hello"], "Argument is not a setting", ""),
        (["--foo.bar", "4"], "Unknown setting foo.bar", "tilewright inspect lists all settings"),
    ],
)
def test_bad_overrides(arguments, what, hint):
    (problem,) = problems(None, arguments)
    assert (problem.what, problem.try_) == (what, hint)


def test_context_parallelism_is_no_setting(tmp_path):
    """Named in four parts, with the axes that there are, wherever it is typed."""
    path = write(tmp_path, "long.toml", "[parallel]\ncp = 2\n")
    for found, got, where in (
        (problems(path), "cp = 2", f"{path}:2"),
        (problems(None, ["--parallel.cp", "2"]), 'cp = "2"', "--parallel.cp on the command line"),
    ):
        (problem,) = found
        assert (problem.what, problem.got, problem.where) == ("Unknown setting parallel.cp", got, where)
        assert problem.need.startswith("settings of [parallel]: pp, ")
        assert {"dp_shard", "tp", "sequence_parallel", "ep"} < set(problem.need.split(": ")[1].split(", "))
        assert problem.try_ == "tilewright inspect lists all settings"


# --- what has no effect -----------------------------------------------------------------------------------------------


def test_a_written_setting_without_effect_is_noted_a_parents_is_not(tmp_path):
    path = write(tmp_path, "a.toml", "[model]\nkv_lora_rank = 3\n")
    (note,) = load_recipe(path, environ={}).notes
    assert note == f'model.kv_lora_rank has no effect here: model.attention = "gqa" ({path}:2)'
    child = write(tmp_path, "b.toml", 'extends = "tiny_moe"\n[model]\nattention = "gqa"\n')
    assert load_recipe(child, environ={}).notes == ()


@pytest.mark.parametrize("name", ["run.toml", "mine.toml"])
def test_a_recipe_that_a_run_wrote_has_no_notes_what_is_typed_beside_it_has(tmp_path, name):
    """It lists every setting, whoever set it; of what a user had written before, the first run has told."""
    loaded = load_recipe(None, {"model.kv_lora_rank": "3", "train.minutes": "2", "train.steps": "9"}, environ={})
    assert len(loaded.notes) == 2
    write_run_toml(loaded, tmp_path / name)
    assert load_recipe(tmp_path / name, environ={}).notes == ()
    for typed, environ in (({"optim.momentum": "0.5"}, {}), ({}, {"TILEWRIGHT_OPTIM_MOMENTUM": "0.5"})):
        (note,) = load_recipe(tmp_path / name, typed, environ=environ).notes
        assert note.startswith("optim.momentum has no effect here")
    child = write(tmp_path, "child.toml", f'extends = "{name}"\n[optim]\nmomentum = 0.5\n')
    (note,) = load_recipe(child, environ={}).notes
    assert note.endswith(f"({child}:3)")


# --- the resolved recipe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_without_a_note_and_survive_writing(tmp_path, name):
    loaded = load_recipe(name, environ={})
    assert loaded.notes == ()
    write_run_toml(loaded, tmp_path / "run.toml")
    assert load_recipe(tmp_path / "run.toml", environ={}).recipe == loaded.recipe


def test_every_value_of_run_toml_names_its_source(tmp_path):
    loaded = load_recipe("cpu_50m", ["--train.steps", "3"], {"DEEPSEEK_PRECISION_MODE": "fp32"})
    write_run_toml(loaded, tmp_path / "run.toml")
    text = (tmp_path / "run.toml").read_text()
    assert "steps = 3 # cli\n" in text
    assert 'mode = "fp32" # env DEEPSEEK_PRECISION_MODE\n' in text
    assert "dim = 512 # file cpu_50m.toml\n" in text
    assert "clip_norm = 1.0 # extends cpu_10m.toml\n" in text
    assert 'start_mode = "none" # default\n' in text
    written = tomllib.loads(text)
    assert written["precision"]["controller"]["interval"] == 100
    assert len(setting_names.flat(written)) == len(list(setting_names.fields()))


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\\\0"), max_size=12).filter(
    lambda name: name not in (".", "..")
)


@given(
    name=names,
    lr=st.floats(1e-12, 1e6),
    weights=st.dictionaries(texts, st.floats(0.1, 1e3), max_size=3),
    ops=st.lists(texts, max_size=3),
    size=st.integers(0, 2**50),
)
def test_any_recipe_survives_writing(tmp_path_factory, name, lr, weights, ops, size):
    folder = tmp_path_factory.mktemp("recipe")
    base = load_recipe(None, environ={})
    recipe = Recipe.model_validate(
        base.recipe.model_dump()
        | {
            "run": {"name": name},
            "optim": {"lr": lr},
            "data": {"weights": weights, "max_bytes": size},
            "precision": {"fp32_ops": ops, "rules": [{"match": name, "compute": "fp16"}]},
        }
    )
    write_run_toml(type(base)(recipe, base.sources, "any"), folder / "run.toml")
    assert load_recipe(folder / "run.toml", environ={}).recipe == recipe


def test_a_misspelt_word_is_suggested():
    with pytest.raises(ConfigError) as caught:
        load_recipe("default", {"train.activation_checkpoint": "matmul"}, environ={})
    assert caught.value.problems[0].try_ == 'activation_checkpoint = "matmuls"'


def test_changed_settings_are_those_of_a_recipe_that_was_loaded_with_them():
    settings = {"train.steps": 7, "optim.lr": 0.5, "optim.warmup_steps": 2}
    before = load_recipe(None, {}, {}).recipe
    after = changed(before, settings)
    assert after == load_recipe(None, {name: str(value) for name, value in settings.items()}, {}).recipe
    assert before == Recipe() != after
    assert changed(before, {}) == before


def test_settings_of_a_plan_are_in_the_recipe_with_their_source():
    settings = {"train.steps": 7, "optim.warmup_steps": 2}
    loaded = load_recipe(None, {"train.steps": "7"}, {})
    planned = with_settings(loaded, settings, "fast.toml")
    assert planned.recipe == load_recipe(None, {name: str(value) for name, value in settings.items()}, {}).recipe
    assert planned.sources["optim.warmup_steps"] == "plan fast.toml"
    assert planned.sources["train.steps"] == loaded.sources["train.steps"]  # as it was
    assert accepted(loaded.recipe, settings) == planned.recipe
    with pytest.raises(ConfigError) as caught:
        with_settings(loaded, {"precision.start_mode": loaded.recipe.precision.mode}, "fast.toml")
    assert caught.value.problems[0].where == "fast.toml"
    assert accepted(loaded.recipe, {"precision.start_mode": loaded.recipe.precision.mode}) is None
    with pytest.raises(ConfigError, match=r"that no recipe has"):
        with_settings(loaded, {"train.steps": -1}, "fast.toml")
    assert accepted(loaded.recipe, {"train.steps": -1}) is None


@pytest.mark.parametrize("source", ["cli", "env", "file", "extends"])
def test_micro_batch_follows_a_smaller_batch_of_a_more_specific_source(tmp_path, source):
    write(tmp_path, "parent.toml", "[train]\nmicro_batch_size = 16\nglobal_batch_size = 16\n")
    text = 'extends = "parent.toml"\n' + ("[train]\nglobal_batch_size = 2\n" if source in ("file", "extends") else "")
    file = write(tmp_path, "child.toml", text)
    if source == "extends":
        file = write(tmp_path, "grandchild.toml", 'extends = "child.toml"\n')
    overrides = ["--train.global_batch_size", "2"] if source == "cli" else []
    environ = {"TILEWRIGHT_TRAIN_GLOBAL_BATCH_SIZE": "2"} if source == "env" else {}
    loaded = load_recipe(file, overrides, environ=environ)
    assert (loaded.recipe.train.global_batch_size, loaded.recipe.train.micro_batch_size) == (2, 2)
    assert loaded.sources["train.micro_batch_size"] == "follows train.global_batch_size"


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("[train]\nmicro_batch_size = 4\nglobal_batch_size = 2\n", []),
        ("[train]\nglobal_batch_size = 2\nmicro_batch_size = 4\n", []),
        ("", ["--train.micro_batch_size", "4", "--train.global_batch_size", "2"]),
        ("[train]\nglobal_batch_size = 2\n", ["--train.micro_batch_size", "4"]),
    ],
)
def test_micro_batch_that_was_asked_for_with_the_batch_or_after_it_is_a_conflict(tmp_path, file, overrides):
    with pytest.raises(ConfigError, match=r"micro_batch_size = 4"):
        load_recipe(write(tmp_path, "mine.toml", file), overrides, environ={})


_WAYS = ("grandparent", "parent", "file", "env", "cli")
"""Where a setting can be given, the least specific first."""


def _loaded(tmp_path, given):
    """The recipe where each of `_WAYS` gives the settings of `[train]` that are named for it."""

    def lines(way):
        return "".join(f"{name} = {value}\n" for name, value in given.get(way, {}).items())

    write(tmp_path, "grandparent.toml", "[train]\n" + lines("grandparent"))
    write(tmp_path, "parent.toml", 'extends = "grandparent.toml"\n[train]\n' + lines("parent"))
    file = write(tmp_path, "file.toml", 'extends = "parent.toml"\n[train]\n' + lines("file"))
    environ = {f"TILEWRIGHT_TRAIN_{name.upper()}": str(value) for name, value in given.get("env", {}).items()}
    typed = [f"--train.{name}={value}" for name, value in given.get("cli", {}).items()]
    return load_recipe(file, typed, environ=environ)


@pytest.mark.parametrize(("lower", "higher"), list(itertools.combinations(_WAYS, 2)))
@pytest.mark.parametrize("names", [("steps", "minutes"), ("minutes", "steps")])
def test_of_steps_and_minutes_the_more_specific_source_decides(tmp_path, lower, higher, names):
    loaded = _loaded(tmp_path, {lower: {names[0]: 7}, higher: {names[1]: 3}})
    train = loaded.recipe.train
    assert (getattr(train, names[0]), getattr(train, names[1])) == (0, 3)
    assert loaded.sources[f"train.{names[0]}"] == f"follows train.{names[1]}"
    assert not loaded.notes


@pytest.mark.parametrize("way", _WAYS)
def test_minutes_alone_leave_the_number_of_steps_open(tmp_path, way):
    loaded = _loaded(tmp_path, {way: {"minutes": 2.5}})
    assert (loaded.recipe.train.steps, loaded.recipe.train.minutes) == (0, 2.5)
    assert loaded.sources["train.steps"] == "follows train.minutes"
    off = _loaded(tmp_path, {way: {"minutes": 0}})
    assert (off.recipe.train.steps, off.recipe.train.minutes) == (400, 0)  # the schema's own


@pytest.mark.parametrize("way", ["file", "env", "cli"])
@pytest.mark.parametrize("names", [("steps", "minutes"), ("minutes", "steps")])
def test_of_steps_and_minutes_in_one_place_steps_count_and_it_is_said(tmp_path, way, names):
    loaded = _loaded(tmp_path, {way: {names[0]: 9, names[1]: 9}})
    assert (loaded.recipe.train.steps, loaded.recipe.train.minutes) == (9, 9)
    (note,) = loaded.notes
    assert note.startswith("train.minutes has no effect here: train.steps is given")
