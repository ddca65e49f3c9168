"""A format with a name in recipes is written into four files, and no other: a copy of the package that has these four
changed, and links to all others, trains in it by its name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright
from tilewright.core import env

PACKAGE = Path(tilewright.__file__).parent
TESTS = Path(__file__).parents[1]
NAME = "e3m4_half_rows"
CHANGES = {
    "formats/spec.py": ("\nSPECS", '\nE3M4 = FloatSpec("e3m4", 8, 3, 4, torch.uint8)\nSPECS'),
    "formats/scaling.py": ("\nMX_SCALE", "\nHALF_ROW = ScaleSpec(Tile(1, 64), torch.bfloat16)\nMX_SCALE"),
    "precision/policy/gemm_formats.py": (
        '    GemmFormat("bf16"),\n',
        f'    GemmFormat("{NAME}", Operands(*[OperandFormat(_spec.E3M4, _scaling.HALF_ROW)] * 3), "E3M4"),\n'
        '    GemmFormat("bf16"),\n',
    ),
    "core/config/sections/precision.py": ('"nvfp4"]', f'"nvfp4", "{NAME}"]'),
}
TRAINED = f"""
import json, sys
from pathlib import Path
import tilewright
from tests.training.tiny import tiny, write_text
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.training.session import train

here = Path(sys.argv[1])
assert Path(tilewright.__file__).is_relative_to(here), tilewright.__file__
write_text(here / "text")
changes = dict(train__steps=2, train__eval_interval=0, train__sample_tokens=0, checkpoint__interval=0)
train(tiny(here, here / "runs", precision__mode="{NAME}", model__dim=64, **changes))
print(json.dumps(Gemms.all("{NAME}").names))
"""


def _overlay(folder: Path) -> Path:
    """A folder with the package in it: links, and files for the four that are changed."""
    top = folder / "tilewright"
    changed = {PACKAGE / name for name in CHANGES}
    real = {parent for path in changed for parent in path.parents if parent.is_relative_to(PACKAGE)}
    for source in real:
        (top / source.relative_to(PACKAGE)).mkdir(parents=True, exist_ok=True)
    for source in real:
        for path in source.iterdir():
            place = top / path.relative_to(PACKAGE)
            if path not in real and path not in changed and path.name != "__pycache__":
                place.symlink_to(path)
    for name, (before, after) in CHANGES.items():
        text = (PACKAGE / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, name
        text = text.replace(before, after)
        if name.endswith("gemm_formats.py"):
            imports = (
                "from tilewright.formats import scaling as _scaling\nfrom tilewright.formats import spec as _spec\n"
            )
            text = text.replace("\nimport torch\n", f"\nimport torch\n\n{imports}", 1)
        (top / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_recipe_trains_in_a_format_that_four_files_name(tmp_path):
    folder = _overlay(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, str(folder)],
        env=env.importing(folder) | {"PYTHONPATH": f"{folder}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = folder / "runs" / "tiny"
    table = json.loads((run / "precision.json").read_text())
    assert f'"{NAME}"' in json.dumps(table), "the table of the run names it"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
