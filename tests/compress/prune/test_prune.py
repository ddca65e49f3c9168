"""Which units go, how many, and what is said where a kind cannot be cut."""

import pytest
import torch

from tests.compress.prune.models import batch_of, foreign, ours
from tests.compress.prune.test_cut_model import difference_of_losses
from tilewright.compress.prune.prune import best, left, prune
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_scores import METHODS, score
from tilewright.core.errors import ConfigError, NumericsError


@torch.no_grad()
def quiet_channels(model, number):
    """FFN channels of each layer that give out almost nothing, by hand."""
    chosen = {}
    for layer, block in enumerate(model.blocks if hasattr(model, "blocks") else model.layers):
        units = torch.randperm(96)[:number].sort().values
        for module in (block.mlp.gate_proj, block.mlp.up_proj):
            module.weight[units] *= 1e-3
        block.mlp.down_proj.weight[:, units] *= 1e-3
        chosen[(layer,)] = units
    return chosen


@pytest.mark.parametrize("method", ["l1", "activation", "taylor"])
@pytest.mark.parametrize("make", [lambda: ours("gqa"), lambda: foreign("Qwen3")], ids=["ours", "Qwen3"])
def test_units_that_give_out_little_go(make, method):
    model = make()
    quiet = quiet_channels(model, 32)
    batches = [batch_of(model) for _ in range(2)]
    pruned = prune(model, {"ffn": 1 / 3}, importance=method, batches=batches)
    assert pruned.after == {"ffn": 64}
    for place, units in quiet.items():
        assert not set(units.tolist()) & set(pruned.kept["ffn"][place].tolist())
    assert difference_of_losses(model, pruned.model, batches[0]) < 1e-3


def test_random_importance_is_of_the_seed():
    model = ours("gqa")
    first, again, other = (prune(model, {"ffn": 0.5}, importance="random", seed=seed).kept["ffn"] for seed in (1, 1, 2))
    assert all(torch.equal(first[place], again[place]) for place in first)
    assert not all(torch.equal(first[place], other[place]) for place in first)


@pytest.mark.parametrize("name", ["gqa_moe", "mla_q_rank"])
@pytest.mark.parametrize("method", METHODS)
def test_scores_leave_the_model_as_it_was(name, method):
    model = ours(name)
    frozen, marked = list(model.parameters())[:2]
    frozen.requires_grad_(False)
    marked.grad = torch.ones_like(marked)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for kind, (units, *_) in find_units(model)[0].items():
        if method == "activation" and kind == "experts":
            with pytest.raises(ConfigError, match="not known of experts"):
                score(model, units, method, [batch_of(model)])
            continue
        found = score(model, units, method, [batch_of(model)])
        assert set(found) == set(units.places)
        assert all(values.shape == (units.count.units,) and bool((values >= 0).all()) for values in found.values())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not frozen.requires_grad
    assert torch.equal(marked.grad, torch.ones_like(marked))
    assert not model.training


def test_taylor_is_weight_times_gradient_of_whole_units():
    model, kind = ours("gqa"), "heads"
    (units, *_) = find_units(model)[0][kind]
    batch = batch_of(model)
    found = score(model, units, "taylor", [batch])
    out = model.loss(batch)
    (out.loss_sum / out.count).backward()
    attention, width = model.blocks[1].self_attn, 16
    by_hand = torch.zeros(2, dtype=torch.float64)
    for unit in range(2):
        rows = slice(unit * width, unit * width + width)
        queries = slice(unit * 2 * width, (unit + 1) * 2 * width)
        for module, index in ((attention.k_proj, rows), (attention.v_proj, rows), (attention.q_proj, queries)):
            by_hand[unit] += (module.weight * module.weight.grad)[index].sum()
        by_hand[unit] += (attention.o_proj.weight * attention.o_proj.weight.grad)[:, queries].sum()
    torch.testing.assert_close(found[(1,)], by_hand.abs(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("multiple", [1, 8, 32, 128])
def test_widths_are_multiples_and_at_least_one_of_them(share, multiple):
    (units, *_) = find_units(ours("gqa", ffn_dim=352))[0]["ffn"]
    number = left(units, share, multiple)
    assert number % multiple == 0 or number == 352
    assert multiple <= number <= 352
    assert abs(number - 352 * (1 - share)) <= max(multiple, 352 * (1 - share) - 352)


def test_best_keeps_the_order_of_units():
    kept = best({(0,): torch.tensor([5.0, 1.0, 9.0, 5.0])}, 3)
    assert kept[(0,)].tolist() == [0, 2, 3]


def test_several_kinds_at_once():
    model = ours("gqa_moe", num_heads=8, num_kv_heads=4, head_dim=8)
    shares = {"ffn": 0.3, "heads": 0.5, "experts": 0.25, "expert_channels": 0.5, "layers": 0.34}
    pruned = prune(model, shares, importance="l1", multiple={"ffn": 8, "expert_channels": 8})
    config = pruned.model.config
    assert sum(map(len, pruned.kept["ffn"].values())) == 64
    assert (config.num_layers, config.ffn_dim, config.num_kv_heads, config.num_heads) == (2, 64, 2, 4)
    assert (config.num_experts, config.expert_dim) == (6, 16)
    assert model.config.num_layers == 3
    loss = pruned.model.loss(batch_of(model))
    loss.loss_sum.backward()
    assert torch.isfinite(loss.loss_sum)


def test_one_layer_and_one_head_stay_whole():
    _, whole = find_units(ours("tied", num_layers=1))
    assert set(whole) == {"heads", "layers"}
    with pytest.raises(ConfigError, match="heads cannot be cut") as error:
        prune(ours("tied"), {"heads": 0.5}, importance="l1")
    problem = error.value.problems[0]
    assert all((problem.got, problem.need, problem.try_))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_share_out_of_range(share):
    with pytest.raises(ConfigError, match="out of range"):
        prune(ours("gqa"), {"ffn": share}, importance="l1")


def test_layout_that_is_not_understood_is_an_error():
    """Phi-3 keeps queries, keys and values in one matrix, in an order that no hypothesis has."""
    with pytest.raises(ConfigError, match=r"heads (is|are) not understood|heads cannot be cut"):
        prune(foreign("Phi3"), {"heads": 0.5}, importance="l1")


def test_weights_that_are_not_finite():
    model = ours("gqa")
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        prune(model, {"ffn": 0.5}, importance="l1")
