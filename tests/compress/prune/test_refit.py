"""Layers behind a cut are the least-squares fit of what they gave out before, against `lstsq` on the inputs."""

import pytest
import torch
from torch.nn import functional as F

from tests.compress.prune.models import batch_of, foreign, ours
from tests.compress.prune.test_channels import images, resnet, silence
from tilewright.compress.prune.batch_norms import estimate_norms
from tilewright.compress.prune.cut_model import cut, losses_of
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.refit import _NEAR, refit
from tilewright.compress.prune.tensors_of_units import find_units

CASES = {  # model, kind, a layer that reads, whether its weight is [in, out]
    "ours ffn": (lambda: ours("gqa"), "ffn", "model.layers.1.mlp.down_proj", False),
    "ours heads": (lambda: ours("gqa", num_heads=8, num_kv_heads=4), "heads", "model.layers.1.self_attn.o_proj", False),
    "Qwen3": (lambda: foreign("Qwen3"), "ffn", "net.model.layers.2.mlp.down_proj", False),
    "GPT2": (lambda: foreign("GPT2"), "ffn", "net.transformer.h.0.mlp.c_proj", True),
    "ResNet": (resnet, "channels", "net.resnet.encoder.stages.1.layers.0.layer.1.convolution", False),
}  # fmt: skip


def seen_by(model, name, batches):
    """What a layer reads, [M, K]."""
    found = []
    module = model.get_submodule(name)

    def see(module, args):
        x = args[0]
        if isinstance(module, torch.nn.Conv2d):
            x = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride).movedim(1, -1)
        found.append(x.reshape(-1, x.shape[-1]))

    with torch.no_grad():
        model.loss(batches[0])  # models of transformers are tried out first
        handle = module.register_forward_pre_hook(see)
        for batch in batches:
            model.loss(batch)
    handle.remove()
    return torch.cat(found)


def batches_of(model, number):
    return [images(4) if model.task == "image_classification" else batch_of(model) for _ in range(number)]


@pytest.mark.parametrize("number", [1, 4], ids=["fewer rows than inputs", "more"])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_a_regression(name, number):
    make, kind, layer, transposed = CASES[name]
    model = make()
    batches = batches_of(model, number)
    for units in find_units(model)[0][kind]:
        kept = {
            place: torch.randperm(units.size(place))[: units.size(place) // 2].sort().values for place in units.places
        }
        made = cut(model, units, kept)
        refit(model, units, kept, made, batches)
        x_MK = seen_by(model, layer, batches)
        weight = model.get_submodule(layer).weight.detach()
        shares = [(p, s) for p, of in units.shares.items() for s in of if s.tensor == f"{layer}.weight"]
        reads = [(p, s) for p, s in shares if s.dim == (0 if transposed else 1)]
        for place, share in shares:
            if (place, share) not in reads:
                weight = weight.index_select(share.dim, share.index(kept[place], units.size(place)))
        weight_OK = weight.T if transposed else weight.flatten(1)
        ((place, share),) = reads
        kernel = weight_OK.shape[1] // (units.size(place) * share.width * share.parts)
        columns = share.index(kept[place], units.size(place))
        index_S = (columns[:, None] * kernel + torch.arange(kernel)).flatten()
        near = (_NEAR * (x_MK**2).sum() / x_MK.shape[1]).sqrt()
        # minimise |x W - x_S W'|^2 + near^2 |W' - W_S|^2
        left = torch.cat((x_MK[:, index_S], near * torch.eye(len(index_S), dtype=x_MK.dtype)))
        right = torch.cat((x_MK @ weight_OK.T, near * weight_OK[:, index_S].T))
        expected = torch.linalg.lstsq(left, right).solution.T
        got = made.get_submodule(layer).weight.detach()
        got = got.T if transposed else got.flatten(1)
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-8


@pytest.mark.parametrize("make", [lambda: ours("gqa"), resnet], ids=["ours", "ResNet"])
def test_channels_that_give_out_nothing_change_no_weight(make):
    """And the cut model that was fitted is still the same function."""
    model = make()
    kind = "channels" if model.task == "image_classification" else "ffn"
    (units,) = find_units(model)[0][kind][:1]
    number = units.count.units // 2
    kept = {place: torch.randperm(units.size(place))[: number * units.parts.get(place, 1)].sort().values
            for place in units.places}  # fmt: skip
    if kind == "channels":
        silence(model, units, kept)
    else:
        for place, share in (
            (p, s) for p, of in units.shares.items() for s in of if s.tensor.endswith("up_proj.weight")
        ):
            gone = torch.tensor(sorted(set(range(units.size(place))) - set(kept[place].tolist())))
            dict(model.named_parameters())[share.tensor].data.index_fill_(0, gone, 0.0)
    plain, fitted = cut(model, units, kept), cut(model, units, kept)
    refit(model, units, kept, fitted, batches_of(model, 2))
    for (name, one), other in zip(plain.named_parameters(), fitted.parameters(), strict=True):
        assert float((one - other).abs().max()) < 1e-9 * float(one.abs().max().clamp_min(1)), name


def test_a_fitted_cut_is_nearer_to_the_model():
    """Where channels say what others say: here two of three are mixtures of the rest."""
    model = ours("gqa", num_layers=1)
    mlp = model.blocks[0].mlp
    with torch.no_grad():
        for module in (mlp.gate_proj, mlp.up_proj):
            module.weight[32:] = 0.1 * module.weight[:32].repeat(2, 1) + 0.02 * torch.randn(64, module.weight.shape[1])
    batches = [batch_of(model) for _ in range(8)]
    far = []
    for fit in (False, True):
        made = prune(model, {"ffn": 0.5}, importance="l1", batches=batches, refit=fit).model
        with torch.no_grad():
            a, b = (one.hidden(batches[0]) for one in (made, model))
        far.append(float((a - b).norm() / b.norm()))
    assert far[1] < far[0]


def test_a_fit_that_brings_nothing_is_left_out():
    """The batches say which: here the fit is to inputs that the cut model does not have, layer after layer."""
    model, batches = resnet(depths=(3, 3), widths=(32, 32)), [images(4) for _ in range(2)]
    made, other = (
        prune(model, {"channels": 0.5}, importance="l1", batches=batches, refit=fit) for fit in (True, False)
    )
    assert other.fitted == {}
    plain = other.model
    estimate_norms(plain, batches)
    whole, own, without = (losses_of(one, batches) for one in (model, made.model, plain))
    assert float((own - whole).abs().sum()) <= float((without - whole).abs().sum())
    same = all(torch.equal(a, b) for a, b in zip(made.model.parameters(), plain.parameters(), strict=True))
    assert made.fitted == {"channels": not same}
