"""`doctor --parallel` of experts in 8 bits: routing and gradients are held, and faults are found all the same."""

import json
import os

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.commands import call_in_fork
from tests.models.shapes import KERNELS, SHAPES
from tests.parallel.inside.experts.test_stacked import model_of
from tests.training.tiny import settings, write_text
from tilewright.cli.app import cli
from tilewright.cli.commands.outputs import parity
from tilewright.cli.commands.outputs.parity_held import HeldChoices, hold_gradients
from tilewright.cli.commands.outputs.parity_limits import ParityLimits
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.moe import MoE, Router


def decoder():
    model = Decoder(SHAPES["gqa_moe"], KERNELS)
    init_weights(model, 0)
    return model.train()


def losses(model, checkpoint):
    """Of two batches, forward and backward, and the gradients."""
    model.activation_checkpoint = checkpoint
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2):
        ids = torch.randint(0, 50, (2, 17), generator=generator)
        loss = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).loss_sum
        loss.backward()
        found.append(loss.item())
    return found, {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def drifted(model):
    """Its routers would choose otherwise, and what they weigh is the same but for that."""
    for name, param in model.named_parameters():
        if "gate.weight" in name:
            with torch.no_grad():
                param.copy_(param.flip(0))


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("make", ["own", "qwen3_moe", "deepseek_v3"])
def test_choices_are_those_that_were_written_down(make, checkpoint):
    new = decoder if make == "own" else lambda: model_of(make)
    first = new()
    kept = HeldChoices(first, None)
    want = losses(first, checkpoint)
    same = new()
    held = HeldChoices(same, kept.seen)
    got = losses(same, checkpoint)
    assert got[0] == want[0], "its own choices are those"
    assert all(torch.equal(got[1][name], grad) for name, grad in want[1].items())
    assert {changed for changed, _ in held.shares().values()} == {0}
    assert held.shares().keys() == kept.shares().keys() != set()

    other = new()
    drifted(other)
    held = HeldChoices(other, kept.seen)
    chosen = []
    for module in other.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, out: chosen.append(out[1].cpu().numpy()))
    losses(other, checkpoint)
    for name, (changed, made) in held.shares().items():
        assert changed > made / 10, f"{name} would have chosen otherwise, and did not say so: {changed} of {made}"
    if make == "own":
        seen = list(kept.seen.values())
        assert all(any(np.array_equal(one, other) for other in seen) for one in chosen)


def test_gradients_are_put_in_the_place_of_others():
    model = torch.nn.Linear(4, 3)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    given = {"gradient/weight, step 2": np.arange(12.0).reshape(3, 4)}
    bias = model.bias.grad.clone()
    hold_gradients(model.named_parameters(), given, ", step 2")
    assert model.weight.grad.tolist() == given["gradient/weight, step 2"].tolist()
    assert model.weight.grad.dtype == torch.float32
    assert torch.equal(model.bias.grad, bias)


def doctor(tmp_path, monkeypatch, mesh, *, forks=True, **more):
    """What it printed, and its exit code."""
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    if forks:
        monkeypatch.setattr(parity, "call_module", call_in_fork)
    given = settings(tmp_path, tmp_path / "runs", precision__mode="fp8_tile", **more)
    given |= {"ops.cross_entropy": "native", "model.num_experts": "4"}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    result = CliRunner().invoke(cli, ["doctor", "--json", "--parallel", mesh, "tiny_moe", *arguments])
    text = result.output
    return json.loads(text[text.index("{") : text.rindex("}") + 1]), result


def beyond(found):
    """Kinds of what is beyond its tolerance."""
    return {gap["kind"] for gap in found["gaps"] if gap["error"] > gap["tolerance"]}


@pytest.mark.slow
@pytest.mark.dist
def test_experts_in_8_bits_are_those_of_one_process(tmp_path, monkeypatch):
    found, result = doctor(tmp_path, monkeypatch, "dp_shard=1,tp=2,ep=2", optim__kind="muon")
    assert result.exit_code == 0, result.output
    worst = {kind: max(gap["error"] for gap in found["gaps"] if gap["kind"] == kind) for kind in parity_kinds(found)}
    print(worst)
    assert worst.keys() == {"loss", "gradient", "weight", "routing"}
    assert worst["weight"] <= 1e-5, "updates of equal gradients"
    assert any(gap["name"].endswith(", step 3") for gap in found["gaps"])


def parity_kinds(found):
    return {gap["kind"] for gap in found["gaps"]}


RANKS = """
import os

if os.environ.get("WORLD_SIZE") == "2":
"""
FAULTS = {
    "gradient": """
    from tilewright.parallel.inside.tensor.collectives import TensorRanks as place
    real = place._sum
    place._sum = lambda self, x: real(self, x) * (1.1 if x.ndim == 3 else 1.0)
""",
    "routing": """
    from tilewright.models.decoder.moe import Router as place
    real = place._choose
    place._choose = lambda self, scores: real(self, scores.flip(-1))
""",
    "weight": """
    from tilewright.optim.muon import Muon as place
    real = place.step

    def step(self, *args):
        for group in self.param_groups:
            group["lr"] = group["lr"] * 1.05
        return real(self, *args)

    place.step = step
""",
}
"""A `sitecustomize` of the processes of the check: sums that are a tenth too large, routers that see another order of
scores, an optimizer that goes a twentieth too far."""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found(tmp_path, monkeypatch, kind):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(RANKS + FAULTS[kind])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "early"), prepend=os.pathsep)
    found, result = doctor(tmp_path, monkeypatch, "dp_shard=1,tp=2,ep=2", forks=False, optim__kind="muon")
    assert result.exit_code != 0
    assert kind in beyond(found), {gap["kind"]: gap["error"] for gap in found["gaps"]}


def test_every_router_is_held():
    """One that ran without its choices is beyond every tolerance, as it is missing."""
    limits = ParityLimits(loss=1.0, gradient=1.0, expert=1.0, weight=1.0, routing=1.0)
    (gap,) = parity.gaps({"routing/a": np.zeros(1), "choice/0/x/a/0": np.zeros(1)}, {}, limits)
    assert (gap.kind, gap.ok) == ("routing", False)
    assert all(isinstance(layer.gate, Router) for layer in decoder().modules() if isinstance(layer, MoE))
