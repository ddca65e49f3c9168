"""`doctor --parallel` with matrices that are cut, in stages and without, on families: our decoder, dense and with
experts in 8 bits, Llama, Qwen3, Qwen3-MoE and DeepSeek-V3."""

import json

import pytest
from click.testing import CliRunner

from tests.commands import call_in_fork
from tests.training.test_tensor_hf import write_model
from tests.training.tiny import settings, write_text
from tilewright.cli.app import cli
from tilewright.cli.commands.outputs import parity

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]
OWN = {
    "decoder": ("default", {"model__num_kv_heads": 2, "optim__kind": "adamw"}),
    "moe_cpu": ("moe_cpu", {"optim__kind": "adamw", "parallel__ep": 1}),
}
DENSE = ("decoder", "llama", "qwen3")
MESHES = [("decoder", "dp_shard=2,tp=2"), ("llama", "dp_shard=2,tp=2")]
MESHES += [(family, mesh) for family in ("qwen3_moe", "deepseek_v3") for mesh in ("tp=2", "tp=2,ep=2")]
MESHES += [("moe_cpu", mesh) for mesh in ("tp=2", "tp=2,ep=2")]
MESHES += [("llama", "tp=2"), ("qwen3", "tp=2")]  # that of the decoder is in test_parity.py
STAGES = [("llama", "1f1b"), ("qwen3", "zbv"), ("qwen3_moe", "interleaved"), ("deepseek_v3", "1f1b")]
STAGES += [("moe_cpu", "1f1b")]  # and so is that of the decoder


@pytest.mark.parametrize(("family", "schedule"), STAGES)
def test_a_family_in_stages_that_are_cut(tmp_path, monkeypatch, family, schedule):
    """A model of more layers than stages is left one for each."""
    check(tmp_path, monkeypatch, family, "pp=2,tp=2", {"parallel__schedule": schedule}, {"num_hidden_layers": 5})


@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_a_family_is_that_of_one_process(tmp_path, monkeypatch, family, mesh):
    check(tmp_path, monkeypatch, family, mesh)


def check(tmp_path, monkeypatch, family, mesh, settings_of_mesh=(), sizes=()):
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parity, "call_module", call_in_fork)
    recipe, more = OWN.get(family, ("default", {}))
    more = dict(settings_of_mesh) | (more if family in OWN else write_model(tmp_path, family, **dict(sizes)))
    mode = {} if family == "moe_cpu" else {"precision__mode": "fp32"}
    given = settings(tmp_path, tmp_path / "runs", ops__cross_entropy="native", **mode, **more)
    arguments = [f"--{name}={value}" for name, value in given.items()]
    result = CliRunner().invoke(cli, ["doctor", "--json", "--parallel", mesh, recipe, *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output[result.output.index("{") : result.output.rindex("}") + 1])
    assert found["beyond"] == 0
    kinds = {gap["kind"] for gap in found["gaps"]}
    assert kinds == {"loss", "gradient", "weight"} | (set() if family in DENSE else {"routing"})
    for kind in kinds:
        worst = max((gap for gap in found["gaps"] if gap["kind"] == kind), key=lambda gap: gap["error"])
        print(f"{family} {mesh}: {kind} {worst['error']:.2g} of {worst['tolerance']:.2g} ({worst['name']})")
