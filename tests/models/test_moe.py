"""Experts: nothing dropped, the choice is DeepSeek-V3's, the bias balances."""

import pytest
import torch

from tests.models.shapes import KERNELS, SHAPES, make_batch, make_decoder
from tests.ops.compare import assert_snr
from tilewright.models.decoder.moe import MoE


def one_token_at_a_time(moe: MoE, x_ND: torch.Tensor) -> torch.Tensor:
    """The definition: each token through its experts, in FP64."""
    moe = moe.double()
    weights, experts = moe.gate(x_ND.float())
    rows = []
    for x_D, weight_K, expert_K in zip(x_ND.double(), weights.double(), experts, strict=True):
        out = sum(w * moe.experts[int(e)](x_D) for w, e in zip(weight_K, expert_K, strict=True))
        rows.append(out + moe.shared_experts(x_D))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["gqa_moe", "deepseek"])
def test_dispatch_equals_the_definition(name):
    moe = make_decoder(name).blocks[1].mlp
    x_BSD = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
    got, load = moe(x_BSD)
    assert load.sum().item() == 2 * 9 * 2, "every token reaches all its experts"
    assert_snr(got.flatten(0, 1), one_token_at_a_time(moe, x_BSD.flatten(0, 1)), 110)


@pytest.mark.support("experts", "one")
def test_gradient_equals_the_definition():
    moe = make_decoder("deepseek").blocks[1].mlp
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(4))
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    moe(inputs[0])[0].square().sum().backward()
    got = {name: param.grad.clone() for name, param in moe.named_parameters()}
    moe.zero_grad()
    one_token_at_a_time(moe, inputs[1].flatten(0, 1)).square().sum().backward()
    assert_snr(inputs[0].grad, inputs[1].grad, 90, "x")
    for name, param in moe.named_parameters():
        want = torch.zeros_like(param) if param.grad is None else param.grad
        if want.abs().sum() > 0:
            assert_snr(got[name], want, 90, name)
        else:
            assert not got[name].any(), name


def test_routing_stays_in_its_groups():
    gate = make_decoder("deepseek").blocks[1].mlp.gate
    weights, experts = gate(torch.randn(200, 64))
    groups = [set((row // 2).tolist()) for row in experts]
    assert max(map(len, groups)) <= 2
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), 2.5))


def test_padding_is_not_load():
    moe = make_decoder("gqa_moe").blocks[1].mlp
    x = torch.randn(1, 8, 64)
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1]], dtype=torch.int32)
    assert moe(x, segments)[1].sum().item() == 5 * 2


def test_bias_evens_out_the_load():
    """A router that prefers two of eight experts is balanced by the bias alone; weights do not see the bias."""
    config = SHAPES["gqa_moe"]
    moe = MoE(config, KERNELS)
    torch.nn.init.normal_(moe.gate.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    for expert in (*moe.experts, moe.shared_experts):
        for param in expert.parameters():
            torch.nn.init.zeros_(param)
    x = torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    with torch.no_grad():
        moe.gate.weight[:2] += 0.02
        first = moe(x)[1]
        for _ in range(400):
            moe.gate.e_score_correction_bias.copy_(moe.gate.rebalanced(moe(x)[1]))
        last = moe(x)[1]
    assert first.max() > 1.8 * first.mean()
    assert last.max() < 1.15 * last.mean()


def test_after_step_counts_micro_batches_once_whatever_is_recomputed():
    biases = []
    for mode in ("none", "full"):
        model = make_decoder("deepseek")
        model.activation_checkpoint = mode
        for seed in (1, 2):
            model.loss(make_batch(seed=seed)).loss_sum.backward()
        assert model._load_LE.sum().item() == 1 * 2 * 32 * 2  # layers, micro-batches, tokens, experts a token
        model.after_step()
        biases.append(model.blocks[1].mlp.gate.e_score_correction_bias.clone())
    assert torch.equal(*biases)
    assert set(biases[0].unique().tolist()) <= {v.item() for v in torch.tensor([-1e-3, 0.0, 1e-3])}
    model.after_step()
    assert torch.equal(biases[0], model.blocks[1].mlp.gate.e_score_correction_bias), "no load, no move"


def test_evaluation_leaves_the_balance_alone():
    model = make_decoder("deepseek").eval()
    out = model.loss(make_batch())
    model.after_step()
    assert not model.blocks[1].mlp.gate.e_score_correction_bias.any()
    assert out.aux["moe_max_violation"].item() >= 0


def test_unused_experts_get_a_zero_gradient():
    model = make_decoder("gqa_moe")
    model.loss(make_batch(rows=1, positions=2)).loss_sum.backward()
    grads = [expert.up_proj.weight.grad for expert in model.blocks[1].mlp.experts]
    assert all(grad is not None for grad in grads)
    assert any(not grad.any() for grad in grads)


def test_experts_of_a_rank_see_few_shapes_whatever_comes():
    """oneDNN keeps code for each: a multiple of what came would be a new one each time."""
    moe, seen = make_decoder("gqa_moe").blocks[1].mlp, []
    moe.experts = moe.experts[:2]  # the others are elsewhere
    for expert in moe.experts:
        expert.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for came in (0, 7, 300, 901, 1500):
        moe.exchange = lambda rows, counts, run, came=came: run(
            rows.new_zeros(came, 64).split([came // 3, came - came // 3])
        )[0].new_zeros(len(rows), 64)
        moe.run_experts(torch.randn(256, 64), torch.ones(256, 2), torch.tensor([[0, 1]] * 256))
    assert len(seen) == 10
    assert not any(rows % 64 for rows in seen), "a quarter of the 256 rows of even routing"


def test_an_expert_without_rows_keeps_those_of_no_other():
    moe = make_decoder("gqa_moe").blocks[1].mlp
    x_ND, kept = torch.randn(16, 64, requires_grad=True), []

    def pack(tensor):
        kept.append((tensor.numel(), tensor.untyped_storage().nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_ND = moe.run_experts(x_ND, torch.ones(16, 2), torch.tensor([[0, 1]] * 16))
    assert [nbytes for numel, nbytes in kept if not numel]
    assert not any(nbytes for numel, nbytes in kept if not numel)
    out_ND.sum().backward()
    assert all(expert.up_proj.weight.grad is not None for expert in moe.experts)


def test_experts_of_a_layer_that_is_compiled_whole_run_uncompiled():
    """Their shapes depend on the data; and nothing of torch's compiler is imported before something is compiled."""
    moe = make_decoder("gqa_moe").blocks[1].mlp.requires_grad_(False)
    x_BSD = torch.randn(2, 8, 64)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    out_BSD, load_E = torch.compile(moe, backend=backend)(x_BSD)
    want_BSD, want_E = moe(x_BSD)
    assert torch.allclose(out_BSD, want_BSD, atol=1e-6)
    assert torch.equal(load_E, want_E)
    assert graphs
    assert not any(node.target in (torch.bincount, "bincount", "split") for g in graphs for node in g.graph.nodes)
