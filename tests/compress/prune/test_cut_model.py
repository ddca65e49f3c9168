"""Cutting units whose outputs are zero changes no loss in FP64: each kind, each architecture, any group of queries.

Units are silenced here by hand, by the names of the layers that read them; `cut` finds its tensors without names.
"""

import pytest
import torch

from tests.compress.prune.models import batch_of, foreign, ours
from tests.cover import some
from tests.models.shapes import SHAPES
from tilewright.compress.prune.cut_model import cut, difference, limit
from tilewright.compress.prune.tensors_of_units import find_units

EPS = torch.finfo(torch.float64).eps
NEAR = {"experts": 4 * torch.finfo(torch.float32).eps}  # routers compute in FP32 in any model
READERS = {  # the layers that read a unit, by the ends of their names
    "ffn": ("mlp.down_proj", "mlp.c_proj", "output.dense", "mlp.fc2"),
    "heads": ("self_attn.o_proj", "attn.c_proj", "attention.o_proj"),
    "expert_channels": ("down_proj",),
    "layers": ("o_proj", "down_proj", "c_proj", "output.dense", "fc2"),
}
CUT = {  # which kinds each architecture can be cut in; what is not here stays whole, and is named
    "gqa": {"ffn", "heads", "layers"},
    "tied": {"ffn", "layers"},
    "mla": {"ffn", "heads", "layers"},
    "mla_q_rank": {"ffn", "heads", "layers"},
    "gqa_moe": {"ffn", "heads", "experts", "expert_channels", "layers"},
    "deepseek": {"ffn", "heads", "expert_channels", "layers"},
    "Llama": {"ffn", "heads", "layers"},
    "Llama tied": {"ffn", "heads", "layers"},
    "Llama biased": {"ffn", "heads", "layers"},
    "Mistral": {"ffn", "heads", "layers"},
    "Qwen2": {"ffn", "heads", "layers"},
    "Qwen3": {"ffn", "heads", "layers"},
    "Phi3": {"ffn", "layers"},
    "GPT2": {"ffn", "layers"},
    "Bert": {"ffn", "layers"},
    "ViT": {"ffn", "heads", "layers"},
    "Mixtral": {"ffn", "heads", "layers"},
    "DeepseekV3": {"ffn", "heads", "experts", "expert_channels", "layers"},
}
TWINS = ("mla", "Llama", "Llama tied", "Mistral", "Qwen2")
"""Of MLA with a rank for queries, and of Llama with biases."""
CASES = [(name, kind) for name, kinds in CUT.items() for kind in sorted(kinds)]


def model_of(name):
    return ours(name) if name in SHAPES else foreign(name)


def drawn_units(units, number):
    """So many units of each place, drawn."""
    if units.kind == "layers":
        return {(): torch.randperm(units.count.units)[:number].sort().values}
    return {place: torch.randperm(units.count.units)[:number].sort().values for place in units.places}


@torch.no_grad()
def silence(model, units, kept):
    """Make the units that go give out nothing, by hand."""
    count = units.count.units
    for name, module in model.named_modules():
        place = tuple(int(part) for part in name.split(".") if part.isdigit())
        gone = {p: [u for u in range(count) if u not in kept[p].tolist()] for p in kept}
        if units.kind == "experts":
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias[gone[place]] = -100.0
        elif (
            units.kind == "layers"
            and hasattr(module, "down_proj")
            and not isinstance(module.down_proj, torch.nn.Module)
        ):
            if place[0] in gone[()]:
                module.down_proj.zero_()  # of all experts in one tensor
        elif units.kind == "layers":
            if name.endswith(READERS["layers"]) and place[0] in gone[()]:
                module.weight.zero_()
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
        elif name.endswith(READERS[units.kind]) and place in kept and hasattr(module, "weight"):
            if units.kind == "ffn" and "attention" in name:
                continue
            weight = module.weight.T if hasattr(module, "nf") else module.weight  # [out, in]
            view = weight.unflatten(1, (-1, count)) if units.kind != "heads" else weight.unflatten(1, (count, -1))
            if units.kind == "heads":
                view[:, gone[place]] = 0
            else:
                view[..., gone[place]] = 0


@pytest.mark.parametrize(
    ("name", "kind"),
    some(CASES, *(case for case in CASES if case[0] not in TWINS)),
    ids=[f"{name}-{kind}" for name, kind in CASES],
)
def test_cutting_silent_units_changes_nothing(name, kind):
    model = model_of(name)
    found, _ = find_units(model)
    batch, last = batch_of(model), None
    for units in found[kind]:
        kept = drawn_units(units, units.count.units - 1 if units.count.units < 4 else units.count.units // 2 + 1)
        tried = model_of(name)
        tried.load_state_dict(model.state_dict())
        if kind == "layers" and name in ("Bert", "ViT"):
            last = difference(model, units, kept, cut(model, units, kept))  # no silent layer: norms are behind it
        elif (name, kind) in (("DeepseekV3", "expert_channels"), ("Mixtral", "ffn")):
            last = difference(model, units, kept, cut(model, units, kept))  # all experts are in one tensor
        else:
            silence(tried, units, kept)
            made = cut(tried, units, kept)
            last = difference_of_losses(tried, made, batch)
            assert difference(tried, units, kept, made) < limit(tried, kind) or units is not found[kind][-1]
        if last < NEAR.get(kind, 64 * EPS):
            break
    assert last < NEAR.get(kind, 64 * EPS), f"worst loss differs by {last:.1e} of the mean"


@torch.no_grad()
def difference_of_losses(a, b, batch):
    """Largest difference of single losses, as a share of their mean."""
    one, two = (model.loss(batch) for model in (a, b))
    x, y = (out.loss_sum[None] if out.each is None else out.each for out in (one, two))
    return float((x - y).abs().max() / x.abs().mean())


@pytest.mark.parametrize("name", CUT)
def test_what_cannot_be_cut_is_named(name):
    model = model_of(name)
    found, whole = find_units(model)
    assert CUT[name] <= set(found), whole
    for kind in set(found) - CUT[name]:
        for units in found[kind]:
            kept = drawn_units(units, units.count.units - 1)
            far = difference(model, units, kept, cut(model, units, kept))
            assert far > limit(model, kind), f"{kind} can be cut after all"
    assert all(reason and not reason.endswith(".") for reason in whole.values())


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", [2, 3, 4, 6])
def test_key_value_heads_go_with_their_queries(groups, queries):
    """Any number of queries per key/value head, and any number of these."""
    model = ours("gqa", num_heads=groups * queries, num_kv_heads=groups, head_dim=6, num_layers=1)
    (units, *_) = find_units(model)[0]["heads"]
    kept = drawn_units(units, int(torch.randint(1, groups, ())))
    silence(model, units, kept)
    made = cut(model, units, kept)
    assert (made.config.num_heads, made.config.num_kv_heads) == (queries * len(kept[(0,)]), len(kept[(0,)]))
    assert difference_of_losses(model, made, batch_of(model)) < 64 * EPS


def test_cut_tied_weights_are_one_parameter():
    for model in (ours("tied"), foreign("Llama tied")):
        (units, *_) = find_units(model)[0]["ffn"]
        made = cut(model, units, drawn_units(units, 40))
        assert (
            made.head.weight
            is (
                made.net.get_input_embeddings()
                if hasattr(made.net, "get_input_embeddings")
                else made.model.embed_tokens
            ).weight
        )


def test_a_cut_shares_no_memory_and_leaves_the_model_as_it_was():
    model = ours("gqa_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, _ = find_units(model)
    for kind, ways in found.items():
        kept = drawn_units(ways[0], max(ways[0].count.least, 2))
        made = cut(model, ways[0], kept)
        difference(model, ways[0], kept, made)
        with torch.no_grad():
            for param in made.parameters():
                param.zero_()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), (kind, name)
