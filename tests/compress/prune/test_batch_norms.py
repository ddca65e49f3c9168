"""Statistics of batch norms are those of what arrives at them, one after another, over all batches."""

import pytest
import torch

from tests.compress.prune.models import ours
from tests.compress.prune.test_channels import images, resnet
from tests.optim.test_citizen import assert_in_words
from tilewright.compress.prune.batch_norms import estimate_norms
from tilewright.compress.prune.prune import prune
from tilewright.core.errors import ConfigError


def arriving(model, batches):
    """What arrives at each batch norm while all of them norm by their batch, by name and batch."""
    found = {}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: found.setdefault(name, []).append(args[0]))
        for name, module in norms.items()
    ]
    for module in norms.values():
        module.train()
    with torch.no_grad():
        for batch in batches:
            model.loss(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("number", [1, 3])
def test_statistics_are_means_over_batches(number):
    model, batches = resnet().eval(), [images(4) for _ in range(number)]
    before = {name: param.clone() for name, param in model.named_parameters()}
    momenta = [module.momentum for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    model.loss(batches[0])
    estimate_norms(model, batches)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert not any(module.training for module in model.modules())
    assert momenta == [module.momentum for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    found = {name: (module.running_mean.clone(), module.running_var.clone()) for name, module in model.named_modules()
             if isinstance(module, torch.nn.BatchNorm2d)}  # fmt: skip
    for name, inputs in arriving(model, batches).items():
        means = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
        spreads = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in inputs]).mean(0)
        assert (found[name][0] - means).abs().max() < 1e-12 * (1 + means.abs().max()), name
        assert (found[name][1] - spreads).abs().max() < 1e-12 * (1 + spreads.abs().max()), name


def test_a_fitted_cut_of_channels_has_its_own_statistics():
    """A cut without a fit keeps those of the uncut model."""
    model, batches = resnet(), [images(4) for _ in range(2)]
    name = "net.resnet.encoder.stages.1.layers.0.layer.1.normalization"
    plain = prune(model, {"channels": 0.5}, importance="l1").model.get_submodule(name)
    fitted = prune(model, {"channels": 0.5}, importance="l1", batches=batches, refit=True).model
    whole = model.get_submodule(name).running_var
    assert all(any(torch.equal(value, other) for other in whole) for value in plain.running_var)
    found = {key: tensor.clone() for key, tensor in fitted.named_buffers()}
    estimate_norms(fitted, batches)
    assert all(torch.equal(tensor, found[key]) for key, tensor in fitted.named_buffers())


def test_models_without_batch_norms_are_left_alone():
    model = ours("gqa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate_norms(model, [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_value_per_channel_has_no_variance():
    """A single image that is one pixel behind the last stage; all is put back."""
    model = resnet()
    momenta = [module.momentum for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    batch = images(1)
    tiny = batch | {"pixel_values": batch["pixel_values"][..., :8, :8]}
    with pytest.raises(ConfigError) as caught:
        estimate_norms(model, [tiny])
    assert_in_words(caught.value, "one value per channel", "--train.micro_batch_size 2")
    assert momenta == [module.momentum for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert not any(module.training for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    estimate_norms(model, [images(4)])
