"""Experts run as one operation against experts run one after another, and against float64."""

import pytest
import torch

from tilewright.core.config.sections.model import ModelSection
from tilewright.formats.quant_error import sqnr_db
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.float8.experts import ExpertRunner
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS
from tilewright.precision.policy.policy import Policy, Rule

KERNELS = Kernels.default()


def moe_model(mode="fp8_tile", *rules):
    section = ModelSection(dim=128, num_layers=2, num_heads=2, num_experts=4, num_dense_layers=1, expert_dim=72)
    model = build_model(section, 300, KERNELS, "cpu")
    init_weights(model, 0)
    convert(model, Policy(mode, rules), kernels=KERNELS)
    return model.train()


def loss_and_gradients(model, seed=0):
    ids = torch.randint(0, 300, (3, 65), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    out = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()})
    (out.loss_sum / out.count).backward()
    return float(out.loss_sum), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["fp8_tile", "fp8_hybrid"])
def test_grouped_equals_one_by_one(mode):
    model = moe_model(mode)
    moe = model.blocks[1].mlp
    assert isinstance(moe.expert_runner, ExpertRunner)
    loss, grads = loss_and_gradients(model)
    moe.expert_runner = None
    loss_alone, grads_alone = loss_and_gradients(model)
    assert loss == pytest.approx(loss_alone, rel=1e-4)
    for name, grad in grads.items():
        assert sqnr_db(grads_alone[name], grad) > 35, name  # sums of other lengths; tiles are the same rows


def test_gradients_point_where_those_of_fp32_do():
    loss, grads = loss_and_gradients(moe_model())
    wide_loss, wide = loss_and_gradients(moe_model("fp32"))
    assert loss == pytest.approx(wide_loss, rel=0.01)
    for name, grad in grads.items():
        if grad.norm() and ".experts." in name:
            assert torch.cosine_similarity(grad.flatten(), wide[name].flatten(), dim=0) > 0.97, name


def test_an_expert_without_rows_gets_a_zero_gradient():
    model = moe_model()
    moe = model.blocks[1].mlp
    rows = [torch.randn(n, 128, dtype=torch.bfloat16) for n in (5, 0, 130, 1)]
    outs = moe.expert_runner(rows, list(moe.experts))
    assert [len(out) for out in outs] == [5, 0, 130, 1]
    torch.cat(outs).sum().backward()
    gradients = [expert.down_proj.weight.grad for expert in moe.experts]
    assert [bool(g.abs().sum() > 0) for g in gradients] == [True, False, True, True]
    for expert, x, out in zip(moe.experts, rows, outs, strict=True):
        if len(x):
            assert sqnr_db(expert(x), out) > 40


@pytest.mark.parametrize("rule", [Rule("*.experts.2.*", wgrad="bf16"), Rule("*.experts.*", compute="bf16")])
def test_experts_of_different_formats_run_one_by_one(rule):
    model = moe_model("fp8_tile", rule)
    assert model.blocks[1].mlp.expert_runner is None
    assert loss_and_gradients(model)[0] > 0


@pytest.mark.parametrize("mode", SCALED_FORMATS)
def test_the_router_stays_in_fp32(mode):
    rows = {row.fqn: row for row in moe_model(mode).precision_report.rows}
    assert rows["model.layers.1.mlp.gate"].compute == "fp32"
    assert rows["model.layers.1.mlp.experts.0.up_proj"].compute == mode
    assert rows["lm_head"].compute == rows["model.embed_tokens"].compute == "bf16"
    assert rows["model.layers.0.self_attn.o_proj"].compute == f"{mode}/bf16/bf16"
