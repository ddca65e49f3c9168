"""Values of any depth, length and content: an error that fits a screen, at once, or a recipe. Never a traceback."""

import json
import random
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fuzz_config import run_case
from tests.draws import examples
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe, write_run_toml
from tilewright.core.errors import MAX_LINES, ConfigError

INTEGERS = [field.path for field in setting_names.fields() if field.wants.startswith("an integer")]
EVERY = [field.path for field in setting_names.fields()]


def outcome(*, file=None, text=None, overrides=(), environ=None):
    """The message of a ConfigError, checked to fit a screen, or "" where it loads."""
    if file is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        load_recipe(file, overrides, environ=environ or {})
    except ConfigError as error:
        said = str(error)
        assert len(said.splitlines()) <= MAX_LINES, said
        assert max(map(len, said.splitlines())) < 1000, said
        assert all(line.isprintable() for line in said.split("\n")), ascii(said)
        said.encode("utf-8")
        return said
    return ""


ODD_NAMES = st.text(
    st.characters(codec=None, exclude_characters="/\0", exclude_categories=["Cs"])
    | st.sampled_from("\n\r\x1b\x7f\udce9\udcff#\"'"),
    min_size=1,
    max_size=20,
)
"""Of files, as Python has them: a byte that is not UTF-8 is one half of a surrogate pair."""


@examples(40)
@given(ODD_NAMES, st.booleans())
def test_a_recipe_may_have_any_name(name, is_parent):
    """What a run keeps of it is read again, with the same values and no others."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.toml"
        file.write_text("[train]\nsteps = 3\n")
        if is_parent and name.isprintable():
            file = Path(folder) / f"{'child' * 5}.toml"
            file.write_text(f"extends = {json.dumps(f'{name}.toml')}\n")
        loaded = load_recipe(file, environ={})
        written = Path(folder) / "run" / "run.toml"
        written.parent.mkdir()
        write_run_toml(loaded, written)
        assert load_recipe(written, environ={}).recipe == loaded.recipe
        assert all(source.isprintable() for source in loaded.sources.values())


@pytest.mark.parametrize("path", INTEGERS)
@pytest.mark.parametrize("bits", [31, 63, 1400, 20_000])
def test_a_huge_integer_is_refused_with_its_limit(path, bits):
    value = 2**bits
    if path == "run.seed" and bits < 63:
        pytest.skip("a seed has 63 bits")
    said = outcome(overrides=[f"--{path}", hex(value)])  # as hexadecimal, which has no limit of digits
    assert "at most" in said, said


@pytest.mark.parametrize(
    "value",
    [
        "1" * 100_000,
        "x" * 100_000,
        "[" * 10_000 + "]" * 10_000,
        "{a=" * 10_000 + "1" + "}" * 10_000,
        "{" + ",".join(f'a{i}="x"' for i in range(20_000)) + "}",
        "\x1b[31mred\x1b]0;title\x07",
        "\udcff",
        "a\0b",
        "nan",
        "1e999",
    ],
    ids=["digits", "letters", "lists", "tables", "entries", "escapes", "bytes", "nul", "nan", "infinite"],
)
@pytest.mark.parametrize("path", ["train.steps", "optim.lr", "data.domains", "data.weights", "precision.rules"])
def test_odd_values_of_each_kind(path, value, tmp_path):
    assert outcome(overrides=[f"--{path}", value])
    assert outcome(environ={"TILEWRIGHT_" + path.upper().replace(".", "_"): value})
    section, _, name = path.rpartition(".")
    assert outcome(file=tmp_path / "r.toml", text=f"[{section}]\n{name} = {value}\n")


@pytest.mark.parametrize("name", ["hidden", "attention"])
@pytest.mark.parametrize("layer", ["01", "00", "1_0", "one", '" 1"', '"\u0663"', '""', "9" * 5000])
def test_a_layer_of_a_teacher_is_written_in_one_way(layer, name):
    """Two ways to write one layer would be two pairs, of which only the last one counts."""
    said = outcome(overrides=["--distill.teacher", "runs/any", f"--distill.{name}", f"{{ {layer} = 0, 1 = 2 }}"])
    assert "Layer is not a number" in said, said


@pytest.mark.parametrize(
    "name", ["a" * 300, "a/b" * 2000, "a\\u0000b", "..", "/", "\\u001b[31m", "x\\ny", "r.toml", ""]
)
def test_extends_of_any_name(name, tmp_path):
    said = outcome(file=tmp_path / "r.toml", text=f'extends = "{name}"\n')
    assert said


@pytest.mark.parametrize("seed", range(60))
def test_quick_fuzz(seed, tmp_path):
    """The first cases of benchmarks/fuzz_config.py."""
    run_case(seed, tmp_path)


def test_a_section_from_the_environment_is_named_as_one():
    assert "model is a section, not a value" in outcome(environ={"TILEWRIGHT_MODEL": "llama"})


def test_many_problems_are_counted(tmp_path):
    said = outcome(file=tmp_path / "r.toml", text="[train]\n" + "".join(f"a{i} = 1\n" for i in range(600)))
    assert said.splitlines()[-1].endswith("more problems")


@pytest.mark.hypothesis
@examples(150)
@given(seed=st.integers(0, 10**9))
def test_generated_configurations(seed, tmp_path_factory):
    """Settings that exist or nearly, with values of any kind, from command line, environment and file."""
    rng = random.Random(seed)
    pool = [
        "7",
        "-1",
        "true",
        '"a"',
        "[1, 2]",
        "{a = 1}",
        "1e400",
        "nan",
        "[[[",
        "\x1b",
        "\udce9",
        "none",
        "24GiB",
        "x" * 9000,
    ]

    def name():
        path = rng.choice(EVERY)
        return path if rng.random() < 0.7 else path[: rng.randrange(len(path))] + rng.choice("xyz.\x07é") + path[-2:]

    given_ = {name(): rng.choice(pool) for _ in range(rng.randrange(4))}
    text = "".join(
        f"[{path.rpartition('.')[0]}]\n{path.rpartition('.')[2]} = {rng.choice(pool)}\n"
        for path in (name() for _ in range(rng.randrange(3)))
    )
    environ = {"TILEWRIGHT_" + name().upper().replace(".", "_"): rng.choice(pool) for _ in range(rng.randrange(2))}
    outcome(file=tmp_path_factory.mktemp("r") / "r.toml", text=text, overrides=given_, environ=environ)


@examples(100)
@given(st.binary(max_size=200))
def test_a_file_of_any_bytes(tmp_path_factory, data):
    said = outcome(file=tmp_path_factory.mktemp("r") / "r.toml", text=data)
    try:
        empty = not tomllib.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        empty = False
    assert (said == "") == empty
