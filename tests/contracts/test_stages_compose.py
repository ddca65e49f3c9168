"""What composes with stages of a pipeline: each setting with another value, alone and with a second one, on two ranks.
Either the run has the losses of one process, or it is refused in an error of four parts, the same on both processes,
before its first step. Never a crash, and never a wait without an end.

The settings and their values are those of `test_settings`. A sample of them by default, all of them under `slow`.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings, write_llama, write_texts
from tests.contracts.test_settings import BASE, PROOFS, Probe
from tests.ranks import on_ranks
from tests.training.tiny import rows
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import TilewrightError
from tilewright.planner.machine import ceilings
from tilewright.training.session import train

pytestmark = pytest.mark.dist
SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipe_v", "interleaved_deferred")
OWN = ("parallel.", "run.", "log.", "ops.", "train.steps", "data.cache_dir")
"""Settings of what is around a run, and of stages themselves: their tests have them."""
NAMES = sorted(name for name, proof in PROOFS.items() if isinstance(proof, Probe) and not name.startswith(OWN))
TOLERANCE = 1e-4
"""Of a loss: sums of gradients in another order, which 8 and 16 bits round to another value now and then."""

DRAWN = ("lora.dropout",)
"""What draws random numbers in a pass: each process draws its own."""


def cases(names, seed):
    """Settings by name of the case: of each setting, half of them with those of a second one."""
    generator, found = torch.Generator().manual_seed(seed), {}

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for name in names:
        others = [pick(NAMES)] if pick((True, False)) else []
        changes = {"model.num_layers": "4", "train.global_batch_size": "8"}
        for one in (*others, name):
            proof = PROOFS[one]
            assert isinstance(proof, Probe)
            changes |= proof.given | {one: proof.value}
        schedule = pick(SCHEDULES)
        staged = {"parallel.pp": "2", "parallel.schedule": schedule}
        staged |= {"parallel.virtual_stages": "2"} if schedule.startswith("interleaved") else {}
        found["+".join((*others, name))] = (BASE | changes, staged)
    return found


def _runs(rank, folder, cases, staged):
    """What each case does on a rank: losses by step, or the parts of its error and whether a step was there before."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    os.chdir(folder)
    found = {}
    for number, (name, (settings, more)) in enumerate(cases.items()):
        own = {"run.name": f"{number}", "run.dir": "staged" if staged else "alone", "data.cache_dir": "cache"}
        run = Path(own["run.dir"], own["run.name"])
        try:
            train(load_recipe(None, {"data.source": "texts"} | settings | (more if staged else {}) | own, {}))
            found[name] = [row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row]
        except TilewrightError as error:
            parts = [(one.what, one.got, one.need, one.try_) for one in error.problems]
            steps = run / "metrics.jsonl"
            found[name] = parts, sum("loss" in row for row in rows(steps)) if steps.exists() else 0
    return found


def check(folder, given):
    """Run the cases, and see that each has one of its two ends; the cases by their end."""
    write_texts(folder / "texts")
    write_llama(folder / "llama")
    config = json.loads((folder / "llama/config.json").read_text()) | {"num_hidden_layers": 4}
    (folder / "llama/config.json").write_text(json.dumps(config))
    (alone,) = on_ranks(1, _runs, str(folder), given, False, seconds=900)
    first, second = on_ranks(2, _runs, str(folder), given, True, seconds=1500)
    wrong, ends = [], {"runs": [], "refused": []}
    for name in given:
        one, staged, settings = alone[name], first[name], given[name]
        if staged != second[name]:
            wrong.append((name, settings, "ranks differ", staged, second[name]))
        elif isinstance(staged, tuple):
            parts, steps = staged
            ends["refused"].append((name, parts))
            whole = all(all(text.strip() for text in problem) for problem in parts)
            if not parts or not whole or (steps and not isinstance(one, tuple)):
                wrong.append((name, settings, "not an error of four parts before the first step", staged))
        elif isinstance(one, tuple):
            wrong.append((name, settings, "refused on one process alone", one))
        else:
            ends["runs"].append(name)
            drawn = any(setting in name for setting in DRAWN)
            if staged != pytest.approx(one, rel=1e-2 if drawn else TOLERANCE, nan_ok=True):
                wrong.append((name, settings, "other losses", one, staged))
    assert not wrong, "\n".join(map(str, wrong))
    return ends


@pytest.mark.timeout(600)
def test_a_sample_of_settings(tmp_path):
    generator = torch.Generator().manual_seed(43)
    picked = [NAMES[place] for place in torch.randperm(len(NAMES), generator=generator)[:2].tolist()]
    assert check(tmp_path, cases(picked, seed=43))["runs"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(4))
def test_all_settings(part, tmp_path):
    assert check(tmp_path, cases(NAMES[part::4], seed=part))["runs"]
