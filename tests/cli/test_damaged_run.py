"""`report` and `inspect` over run folders whose files somebody edited, or a disk damaged: what there is, or an error in
words; never a traceback. `inspect` names the file and the place, `report` counts what it leaves out."""

import copy
import json
import random
import shutil

import pytest

from tests.cli.test_train import arguments
from tests.contracts.observe import fixed_ceilings, write_texts
from tilewright.cli.app import run

WRONG = [None, True, -1, 0, 1.5, 10**400, 1e308, float("nan"), float("inf"), "", "x", [], {}, [1], {"a": 1}, [None]]
WRONG += [[[]], "\ud800", {"x": {"y": []}}]
RAW = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'"x"', b"1", b"NaN", b'{"a":1}', b"[1,2]", b"\x00" * 100,
    b'{"step": 1}\n{"step": "x"}\n', b"[null]", b"[[]]", b'{"step": null}', b"1e999", b"9" * 5000, None,
]  # fmt: skip
TABLES = ["audit.json", "data.json", "machine.json", "plan.json", "precision.json"]
LINES = ["events.jsonl", "metrics.jsonl", "samples.jsonl"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("damaged")
    write_texts(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        assert run(["train", *arguments(run__name="whole", train__eval_interval="2")]) == 0
    shutil.rmtree(folder / "runs" / "whole" / "checkpoints")
    return folder / "runs" / "whole"


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run")


def places(value, at=()):
    """The paths to all values inside a JSON value, of lists to the first three."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*at, key))


def put(value, at, new):
    """The value with another one at a place; `KeyError`: with nothing there."""
    if not at:
        return None if new is KeyError else new
    value = inner = copy.deepcopy(value)
    for key in at[:-1]:
        inner = inner[key]
    if new is KeyError:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return value


def speaks(args, capsys):
    """Run a command: it succeeds, or fails with an error in four parts."""
    code = run(args)
    _, said = capsys.readouterr()
    assert code in (0, 2), (args, said)
    assert "Traceback" not in said
    assert code == 0 or all(f"  {part}" in said for part in ("where", "got", "need", "try")), said
    return code, said


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_files_that_are_no_tables(damaged, whole, raw, capsys):
    """All at once for `report`, which reads them all; one at a time for `inspect`, which stops at the first."""
    for name in [*TABLES, *LINES]:
        if raw is None:
            (damaged / name).unlink()
        else:
            (damaged / name).write_bytes(raw)
    assert speaks(["report", str(damaged)], capsys)[0] == 0
    for name in TABLES:
        shutil.copy(whole / name, damaged / name)
    for name in ("audit.json", "machine.json", "precision.json"):
        if raw is None:
            (damaged / name).unlink()
        else:
            (damaged / name).write_bytes(raw)
        speaks(["inspect", str(damaged)], capsys)
        shutil.copy(whole / name, damaged / name)


def damage(folder, name, draw):
    """Put something wrong somewhere into a file; in lines often at the same place of every row."""
    whole = (folder / name).read_text()
    if name in TABLES:
        value = json.loads(whole)
        at = draw.choice(list(places(value)))
        (folder / name).write_text(json.dumps(put(value, at, draw.choice([*WRONG, KeyError]))))
        return at
    rows = [json.loads(line) for line in whole.splitlines()] or [{"step": 1}]
    hit = draw.choice(rows)
    at, new = draw.choice(list(places(hit))[1:]), draw.choice([*WRONG, KeyError])
    for i, row in enumerate(rows):
        if row is hit or (at in set(places(row)) and draw.random() < 0.5):
            rows[i] = put(row, at, new)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def many_places(damaged, whole, capsys, seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice([*TABLES, *LINES])
        at = damage(damaged, name, draw)
        code, said = speaks(["report", str(damaged)], capsys)
        assert code == 0, (name, at, said)
        for more in ([], ["--json"], ["--diff", str(whole)]):
            speaks(["inspect", str(damaged), *more], capsys)
        shutil.copy(whole / name, damaged / name)


def test_wrong_values_anywhere(damaged, whole, capsys):
    many_places(damaged, whole, capsys, seed=0, count=8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_wrong_values_anywhere_in_many_places(damaged, whole, capsys, seed):
    many_places(damaged, whole, capsys, seed, count=150)


def test_the_place_is_named_and_the_report_counts_what_it_leaves_out(damaged, capsys):
    rows = json.loads((damaged / "precision.json").read_text())
    rows[1]["compute"] = 3
    (damaged / "precision.json").write_text(json.dumps(rows))
    code, said = speaks(["inspect", str(damaged)], capsys)
    assert code == 2
    assert "precision.json" in said
    assert "[1].compute: Input should be a valid string, found 3" in said
    assert speaks(["report", str(damaged)], capsys)[0] == 0
    assert "precision.json: 1 row is not as train writes them and left out" in (damaged / "report.html").read_text()
