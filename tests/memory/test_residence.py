"""Updates layer group by layer group, parameters and states in tiers, against the same optimizer over a model in
memory."""

import pytest
import torch

from tests.models.shapes import KERNELS
from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.build import init_weights, random_values
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.optim.adam import DeepSeekAdam

FORMATS = [
    ("fp32", "fp32", torch.float32),
    ("bf16", "fp32", torch.bfloat16),
    ("bf16", "stochastic", torch.bfloat16),
    ("8bit", "stochastic", torch.bfloat16),
    ("8bit", "split24", torch.bfloat16),
]
TIERS = [("device", "disk", True), ("host", "device", False), ("disk", "disk", True), ("host", "disk", False)]


def make_decoder(tied, device="cpu"):
    config = DecoderConfig.of(vocab_size=61, dim=32, num_heads=4, num_layers=3, ffn_dim=64, tie_embeddings=tied)
    with torch.device(device):
        return Decoder(config, KERNELS)


def to_dtype(model, dtype):
    for param in model.parameters():
        param.data = param.data.to(dtype)


def make_grads(params, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in params]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        gap = (found[name].double() - value.double()).abs().max().item()
        assert gap == 0, f"{name} differs by up to {gap}"


def all_of(pool):
    return {name: value for part in pool._layer_groups for name, value in pool.read(part).items()}


@pytest.mark.parametrize(("moments", "master", "dtype"), FORMATS)
@pytest.mark.parametrize(("parameters", "states", "tied"), TIERS)
def test_updates_equal_those_in_memory(parameters, states, tied, moments, master, dtype, tmp_path):
    plain = make_decoder(tied)
    init_weights(plain, 5)
    to_dtype(plain, dtype)
    reference = DeepSeekAdam(plain.parameters(), lr=0.01, moments=moments, master=master, kernels=KERNELS)

    model = make_decoder(tied, "meta")
    values = random_values(model, 5)
    to_dtype(model, dtype)
    to_placeholders(model, "cpu")
    fill_buffers(model, values)
    optimizer = DeepSeekAdam(model.parameters(), lr=0.01, moments=moments, master=master, kernels=KERNELS)
    layer_groups = find_layer_groups(model, model, group=2)
    home = ParamOffloader(
        model, layer_groups, optimizer, "cpu", parameters=parameters, states=states, folder=tmp_path, values=values
    )  # fmt: skip
    assert len(layer_groups.shared.params) == tied

    order = dict(zip(model.parameters(), plain.parameters(), strict=True))
    for step in range(3):
        grads = dict(zip(plain.parameters(), make_grads(plain.parameters(), step), strict=True))
        reference.step_params(list(grads), list(grads.values()))
        for part in (layer_groups.epilogue, *reversed(layer_groups.groups), layer_groups.prologue, layer_groups.shared):
            home.prefetch(part, states=True)
            home.fetch(part, states=True)
            optimizer.step_params(part.trained, [grads[order[param]] for param in part.trained])
            home.release(part, changed=True)
        home.flush()

    assert_equal(all_of(home.parameters), {name: param.detach() for name, param in plain.named_parameters()})
    names = {param: name for name, param in plain.named_parameters()}
    expected = {
        f"{names[param]}.{key}": value
        for param, state in reference.state.items()
        for key, value in state.items()
        if key != "step"
    }
    assert_equal(all_of(home.states), expected)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    home.close()


def test_forward_passes_bring_no_states(tmp_path):
    model = make_decoder(False)
    init_weights(model, 0)
    optimizer = DeepSeekAdam(model.parameters(), kernels=KERNELS)
    layer_groups = find_layer_groups(model, model)
    home = ParamOffloader(model, layer_groups, optimizer, "cpu", parameters="host", states="disk", folder=tmp_path)
    for part in layer_groups:
        home.fetch(part)
        home.prefetch(part)
        home.release(part, changed=False)
    assert home.parameters.traffic.read_bytes > 0
    assert home.parameters.traffic.written_bytes == home.states.traffic.read_bytes == 0
    home.close()


def test_frozen_parameters_have_no_states_and_are_not_written_back(tmp_path):
    model = make_decoder(False)
    init_weights(model, 0)
    for param in model.model.layers[0].parameters():
        param.requires_grad_(False)
    optimizer = DeepSeekAdam([p for p in model.parameters() if p.requires_grad], kernels=KERNELS)
    layer_groups = find_layer_groups(model, model)
    home = ParamOffloader(model, layer_groups, optimizer, "cpu", parameters="disk", states="disk", folder=tmp_path)
    part = layer_groups.groups[0]
    home.fetch(part, states=True)
    home.release(part, changed=True)
    assert home.states.read(part.name) == {}
    assert home.parameters.traffic.written_bytes == 0
    home.close()
