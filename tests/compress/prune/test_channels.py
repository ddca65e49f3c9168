"""Channels of ResNets, cut with batch norms and all readers: residual sums in groups, any widths, exactly."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.compress.prune.models import drawn
from tests.models.shapes import KERNELS
from tilewright.compress.prune.cut_model import cut, difference, limit
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_scores import METHODS
from tilewright.core.errors import ConfigError
from tilewright.models.hf.load import load_hf

EPS = torch.finfo(torch.float64).eps


def resnet(embedding=16, widths=(16, 32), depths=(2, 1), kind="basic", **changes):
    """A ResNet in FP64 whose batch norms have seen something."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=embedding, hidden_sizes=list(widths), depths=list(depths), layer_type=kind, num_labels=5,
        **changes,
    )  # fmt: skip
    model = drawn(load_hf(config, "image_classification", kernels=KERNELS))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


def images(rows=2):
    pixels = torch.randn(rows, 3, 32, 32, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 5}


@torch.no_grad()
def logits(model, batch):
    return model.net(pixel_values=batch["pixel_values"]).logits


def far(a, b):
    return float((a - b).abs().max() / b.abs().max())


@torch.no_grad()
def silence(model, units, kept):
    """Batch norms of the channels that go give out nothing: their scale and shift are zero."""
    tensors = dict(model.named_parameters())
    for place, shares in units.shares.items():
        gone = torch.tensor([u for u in range(units.size(place)) if u not in set(kept[place].tolist())])
        for share in shares:
            if "normalization" in share.tensor and share.tensor in tensors:
                tensors[share.tensor][gone] = 0


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_cutting_silent_channels_changes_no_logit(data):
    """Any widths with a common part, both kinds of layer, any channels of each group."""
    kind, part = data.draw(st.sampled_from(["basic", "bottleneck"])), data.draw(st.integers(2, 4))
    least = part * (4 if kind == "bottleneck" else 1)
    widths = [least * data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 3)))]
    embedding = data.draw(st.sampled_from([part * data.draw(st.integers(1, 5)), widths[0]]))
    depths = [data.draw(st.integers(1, 2)) for _ in widths]
    first = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    model = resnet(embedding, widths, depths, kind, downsample_in_first_stage=first)
    (units,) = find_units(model)[0]["channels"]
    joined = not first and embedding == widths[0]  # the stem's channels are the first stage's
    inner = sum(depths) * (2 if kind == "bottleneck" else 1)
    assert len(units.places) == inner + len(widths) + (not joined)
    number = data.draw(st.integers(1, units.count.units - 1))
    kept = {
        place: torch.randperm(units.size(place))[: number * units.parts[place]].sort().values for place in units.places
    }
    silence(model, units, kept)
    made, batch = cut(model, units, kept), images()
    assert made.config.hidden_sizes == [width * number // units.count.units for width in widths]
    assert far(logits(made, batch), logits(model, batch)) < 64 * EPS
    assert difference(model, units, kept, made) < limit(model, "channels")


@pytest.mark.parametrize("method", METHODS)
def test_channels_that_give_out_little_go(method):
    model = resnet()
    (units,) = find_units(model)[0]["channels"]
    quiet = {place: torch.randperm(units.size(place))[: units.size(place) // 2] for place in units.places}
    own = dict(model.named_parameters())
    with torch.no_grad():
        for param in own.values():
            param.abs_()  # no channel is silent behind its ReLU
        for place, shares in units.shares.items():
            for share in shares:
                if share.tensor in own:
                    own[share.tensor].index_copy_(
                        share.dim, quiet[place], own[share.tensor].index_select(share.dim, quiet[place]) * 1e-4
                    )
    batch = images(4)
    batch["pixel_values"].abs_()
    pruned = prune(model, {"channels": 0.5}, importance=method, batches=[batch])
    gone = [bool(set(quiet[place].tolist()) & set(kept.tolist())) for place, kept in pruned.kept["channels"].items()]
    assert any(gone) == (method == "random")
    assert pruned.model.config.hidden_sizes == [8, 16]
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, pruned.model))
    assert after < before / 3


def test_a_cut_resnet_is_a_folder_that_reloads(tmp_path):
    import transformers

    pruned = prune(resnet(kind="bottleneck", widths=(16, 32)), {"channels": 0.5}, importance="l1").model
    pruned.save_hf(tmp_path, dtype=torch.float64)
    net, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float64
    )
    assert not any(info.values()), info
    batch = images()
    with torch.no_grad():
        assert far(net.eval()(pixel_values=batch["pixel_values"]).logits, logits(pruned, batch)) < 64 * EPS


@pytest.mark.parametrize("refit", [False, True])
def test_pruning_leaves_the_model_as_it_was(refit):
    """Weights of convolutions are cut along two dimensions, and are all there afterwards: a second cut is the same."""
    model, batches = resnet(), [images(4)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (prune(model, {"channels": 0.5}, importance="l1", batches=batches, refit=refit) for _ in range(2))
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])] == []
    assert all(torch.equal(kept, second.kept["channels"][place]) for place, kept in first.kept["channels"].items())


def test_finding_channels_leaves_the_model_as_it_was():
    model = resnet()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_units(model)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: resnet(widths=(15, 32)), "there are 1"),
        (lambda: resnet(widths=(16, 30), kind="bottleneck"), "no multiples of 4"),
        (lambda: regnet(), "in groups"),
        (lambda: resnet(hidden_act="sigmoid"), "an order of its own"),
    ],
    ids=["no common part", "bottleneck", "groups", "activation"],
)
def test_what_stays_whole_is_named(make, match):
    model = make()
    assert match in find_units(model)[1]["channels"]
    with pytest.raises(ConfigError, match="channels cannot be cut"):
        prune(model, {"channels": 0.5}, importance="l1")


def regnet():
    import transformers

    config = transformers.RegNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8)
    return drawn(load_hf(config, "image_classification", kernels=KERNELS))
