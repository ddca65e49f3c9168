"""What adapters drop: the same again where a layer is recomputed, and of routed experts by token and expert alone."""

import pytest
import torch

from tests.models.shapes import KERNELS, make_batch, make_decoder
from tilewright.precision.convert import convert
from tilewright.precision.lora.adapter import kept_by
from tilewright.precision.lora.lora import add_lora, merge_lora

DROPOUT = 0.3


def adapted(kind):
    model = make_decoder(kind).train()
    add_lora(model, 4, base="keep", dropout=DROPOUT, kernels=KERNELS)
    for name, param in model.named_parameters():
        if name.endswith("lora_B"):
            param.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    return model


def gradients(kind, **settings):
    """Of one batch, with the same numbers drawn first; and what is drawn after backward."""
    model = convert(adapted(kind), "fp32", kernels=KERNELS)
    for name, value in settings.items():
        setattr(model, name, value)
    torch.manual_seed(5)
    model.loss(make_batch()).loss_sum.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, torch.rand(1)


@pytest.mark.parametrize("kind", ["gqa", "deepseek"])
@pytest.mark.parametrize("mode", ["full", "attention", "matmuls", "selective"])
def test_a_layer_that_is_recomputed_drops_the_same(kind, mode):
    """Gradients are those of a layer that is not, to the bit, and backward takes no number from what comes after."""
    want, after = gradients(kind)
    found, after_again = gradients(kind, activation_checkpoint=mode)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert torch.equal(after, after_again)


def test_a_layer_that_is_recomputed_from_codes_drops_the_same():
    """Gradients are off by the 3 % of E4M3; other masks would set them off by as much as they are."""
    want, _ = gradients("gqa")
    found, _ = gradients("gqa", activation_checkpoint="full", checkpoint_inputs="fp8")
    for name in want:
        assert (found[name] - want[name]).norm() < 0.25 * want[name].norm(), name


def test_what_a_row_loses_depends_on_its_key_alone():
    """Each element is dropped with the probability that is asked for, whatever its neighbours are: shares are within
    five standard deviations, in all, by row, and of pairs in one row or one column."""
    generator = torch.Generator().manual_seed(3)
    key_N = torch.randint(-(2**31), 2**31 - 1, (4000,), dtype=torch.int32, generator=generator)
    kept = kept_by(key_N, 96, DROPOUT)
    order = torch.randperm(4000, generator=generator)
    assert torch.equal(kept_by(key_N[order], 96, DROPOUT), kept[order])
    assert torch.equal(kept_by(key_N[:5], 32, DROPOUT), kept[:5, :32])
    pairs = (kept[:, 1:] & kept[:, :-1], kept[:, :48] & kept[:, 48:], kept[1:] & kept[:-1], kept[:2000] & kept[2000:])
    for bits, share in ((kept, 1 - DROPOUT), *((each, (1 - DROPOUT) ** 2) for each in pairs)):
        spread = (share * (1 - share) / bits.numel()) ** 0.5
        assert abs(bits.double().mean().item() - share) < 5 * spread * (1 if bits is kept else 1.5)
    by_row = kept.double().mean(1)
    assert by_row.std().item() == pytest.approx((DROPOUT * (1 - DROPOUT) / 96) ** 0.5, rel=0.05)


def test_matrices_of_an_expert_drop_other_elements():
    """And none after training, in evaluation, or once adapters are merged."""
    model = adapted("gqa_moe")
    moe, seen = model.blocks[1].mlp, []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: seen.append(vars(layer).get("row_keys")))
        for layer in moe.experts[0].children()
    ]
    for mode in (True, False):
        model.train(mode).loss(make_batch(rows=4))
    assert not any("row_keys" in vars(layer) for layer in moe.experts[0].children())
    gate, up, down, *evaluated = seen
    assert not any((one == other).all() for one, other in ((gate, up), (up, down), (gate, down)))
    assert evaluated == [None] * 3
    for hook in hooks:
        hook.remove()
    merge_lora(model)
    assert not moe.draws
