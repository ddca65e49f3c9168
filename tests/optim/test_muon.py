"""Muon against torch.optim.Muon and torch.optim.AdamW, in every format of the states and every use that PyTorch has."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.optim.test_adam import FORMATS
from tests.optim.test_citizen import EVERY_FORMAT, assert_in_words, grads_of, normal, train, uncompiled
from tests.optim.test_states import COPIES
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24
from tilewright.ops.backends.native.newton_schulz import native as newton_schulz
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon

RATES = {"lr": 0.02, "weight_decay": 0.1}
BF16 = Kernels(detect_machine("cpu"), {"newton_schulz": "native"})
"""torch.optim.Muon multiplies in BF16 on every machine; `auto` does not."""
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


def muon(param, **options):
    return Muon([{"params": [param], "muon": True, "stacks": param.ndim == 3}], **{**RATES, "kernels": BF16, **options})


def theirs(param, adjust_lr="match_rms_adamw", **options):
    return torch.optim.Muon([param], **RATES, adjust_lr_fn=adjust_lr, **options)


def worst(got, want):
    return (got.detach().double() - want.detach().double()).abs().max().item() if got.numel() else 0.0


def assert_equal(got, want, what=""):
    assert torch.equal(got, want), f"{what} is off by up to {worst(got, want)}"


# ---- the law, FP32 ----


@given(
    shape=SHAPES,
    adjust_lr=st.sampled_from(["match_rms_adamw", "original"]),
    nesterov=st.booleans(),
    momentum=st.sampled_from([0.0, 0.4, 0.95]),
    scale=st.sampled_from([0.0, 1e-20, 1e-6, 1.0, 1e6]),
)
@pytest.mark.support("muon", "one")
def test_a_matrix_equals_torchs_bit_by_bit(shape, adjust_lr, nesterov, momentum, scale):
    ours, other = nn.Parameter(normal(*shape)), nn.Parameter(normal(*shape))
    optimizer = muon(ours, adjust_lr=adjust_lr, nesterov=nesterov, momentum=momentum)
    reference = theirs(other, adjust_lr, nesterov=nesterov, momentum=momentum)
    grads = [scale * grad for grad in grads_of(ours)]
    assert_equal(train(optimizer, ours, grads), train(reference, other, grads), "the matrix")
    assert_equal(optimizer.state[ours]["exp_avg"], reference.state[other]["momentum_buffer"], "the momentum")


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_iterations_are_as_many_as_asked_for(num_steps):
    ours, other = nn.Parameter(normal(9, 20)), nn.Parameter(normal(9, 20))
    grads = grads_of(ours)
    got = train(muon(ours, num_steps=num_steps), ours, grads)
    assert_equal(got, train(theirs(other, ns_steps=num_steps), other, grads))


VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every_second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "inside_another": lambda x: nn.functional.pad(x, (1, 2))[..., 1:-2],
}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("view", VIEWS)
def test_any_memory_layout_equals_torchs(view, shape):
    ours, other = (nn.Parameter(VIEWS[view](normal(*shape))) for _ in range(2))
    grads = [VIEWS[view](grad) for grad in grads_of(ours)]
    assert_equal(train(muon(ours), ours, grads), train(theirs(other), other, grads))


@EVERY_FORMAT
@pytest.mark.parametrize("view", VIEWS)
def test_any_memory_layout_equals_contiguous_in_every_format(view, dtype, options):
    """Gradients are contiguous, as a loop that fills them gives them; states are loaded from contiguous ones too."""
    plain = nn.Parameter(normal(6, 14).to(dtype))
    other = nn.Parameter(VIEWS[view](plain.detach().clone()))
    first, second = muon(plain, **options), muon(other, **options)
    grads = grads_of(plain, 4)
    for some in (grads[:2], grads[2:]):
        assert_equal(train(second, other, some), train(first, plain, some), view)
        second.load_state_dict(copy.deepcopy(first.state_dict()))


@pytest.mark.parametrize("shape", [(3, 24, 40), (4, 40, 24), (1, 8, 8)])
def test_a_stack_is_its_matrices_one_by_one(shape):
    ours, others = nn.Parameter(normal(*shape)), [nn.Parameter(matrix) for matrix in normal(*shape)]
    grads = grads_of(ours)
    got = train(muon(ours), ours, grads)
    for number, other in enumerate(others):
        want = train(theirs(other), other, [grad[number] for grad in grads])
        # A batched matmul may sum in another order: a BF16 rounding apart, which five iterations pass on.
        error = worst(got[number], want) / worst(want, normal(*shape)[number])
        assert error < 2**-5, f"matrix {number} is off by {error:.2g} of its change"


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 4), (2, 0, 4)])
@EVERY_FORMAT
def test_matrices_without_elements(shape, dtype, options):
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    assert train(muon(param, adjust_lr="original", **options), param, grads_of(param)).shape == shape


@pytest.mark.parametrize("shape", [(30, 30), (20, 70), (70, 20)])
def test_singular_values_go_to_one_and_their_vectors_stay(shape):
    """Independent of the iteration: against the SVD in FP64. The bounds are those that the polynomial has, 0.68 to
    1.13 (K. Jordan), and BF16's rounding."""
    left, _, right = torch.linalg.svd(normal(*shape).double(), full_matrices=False)
    singular = torch.logspace(0, -1.5, min(shape), dtype=torch.float64)
    got = newton_schulz(left @ torch.diag(singular) @ right).double()
    rotated = left.T @ got @ right.T
    diagonal = rotated.diagonal()
    assert diagonal.min() > 0.6, diagonal.min()
    assert diagonal.max() < 1.25, diagonal.max()
    assert (rotated - torch.diag(diagonal)).abs().max() < 0.1


# ---- formats of the states ----


def exact(param, state):
    """The weights that an optimizer holds."""
    if "low" in state:
        return join24(param.detach(), state["low"])
    return state.get("master", param.detach()).float()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stays_close_to_fp32(name):
    """Bounds: a step of the coarsest storage of the weights, and the share of an update that the momentum's rounding
    (8 bits: half a code of a square map, about 1 %; BF16: 2^-9) turns, which Newton-Schulz hands on at most 4-fold."""
    dtype, options = FORMATS[name]
    param = nn.Parameter(normal(48, 64).to(dtype))
    other = nn.Parameter(param.detach().float())
    start = other.detach().clone()
    optimizer, grads = muon(param, **options), [grad.to(dtype).float() for grad in grads_of(param, 6)]
    train(optimizer, param, grads)
    train(theirs(other), other, grads)
    got = exact(param, optimizer.state[param])
    noise = (got - other.detach()).norm() / (other.detach() - start).norm()
    stored = 0.0 if options.get("master") != "stochastic" else 2**-8 * math.sqrt(6) * start.norm().item()
    bound = {"fp32": 0.0, "bf16": 0.02, "8bit": 0.1}[options.get("moments", "fp32")]
    if options.get("master") == "split24":
        bound += 2**-14
    bound += stored / (other.detach() - start).norm().item()
    assert noise <= bound, f"{noise:.3g} of the change, allowed {bound:.3g}"


def test_the_momentum_in_8_bits_is_right_on_average():
    param = nn.Parameter(normal(64, 64))
    optimizer = muon(param, moments="8bit")
    grads = [normal(64, 64, seed=5)] * 40
    train(optimizer, param, grads)
    state = optimizer.state[param]
    got = quadratic_map.decode(state["exp_avg"], state["exp_avg_scale"])
    want = (1 - 0.95**40) * grads[0]
    assert abs((got - want).mean()) < 0.002, "a bias that would add up"
    assert worst(got, want) < 0.1, worst(got, want)


def test_stochastic_weights_keep_updates_below_half_a_step():
    """400 updates of at most 2^-4 of a BF16 step: rounding to nearest would lose all of them."""
    param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [param], "muon": True}], lr=2.0**-10, weight_decay=0.0, momentum=0.0,
                     adjust_lr="original", moments="bf16", master="stochastic", kernels=BF16)  # fmt: skip
    direction = newton_schulz(normal(64, 64)).float()
    for _ in range(400):
        param.grad = normal(64, 64).bfloat16()
        optimizer.step()
    got = param.detach().float() - 1
    want = -400 * 2.0**-10 * direction
    slope = (got * want).sum() / want.square().sum()
    assert slope.item() == pytest.approx(1, abs=0.05)


@EVERY_FORMAT
def test_one_state_for_each_weight_of_a_matrix(dtype, options):
    matrix, vector = nn.Parameter(normal(8, 6).to(dtype)), nn.Parameter(normal(6).to(dtype))
    optimizer = Muon([{"params": [matrix], "muon": True}, {"params": [vector]}], **RATES, **options)
    optimizer.init_states()
    plain = DeepSeekAdam([vector], **RATES, **options)
    assert optimizer.state_layout(vector) == plain.state_layout(vector)
    for param in (matrix, vector):
        state = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        layout = optimizer.state_layout(param)
        assert layout == {name: (value.shape, value.dtype) for name, value in state.items()}
    assert not [name for name in optimizer.state[matrix] if name.startswith("exp_avg_sq")]


# ---- with AdamW for the rest ----


def net(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(normal(*param.shape, seed=seed))
    return model.to(dtype)


def groups_of(model):
    matrices = [model[0].weight, model[2].weight]
    rest = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    return matrices, rest


def mixed(model, **options):
    matrices, rest = groups_of(model)
    return Muon(
        [{"params": matrices, "muon": True}, {"params": rest, "weight_decay": 0.0}],
        **{**RATES, "kernels": BF16, **options},
    )


def backward(model, step):
    model(normal(4, 6, seed=20 + step).to(next(model.parameters()).dtype)).square().mean().backward()


def run_net(model, optimizers, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_both_kinds_equal_torchs_two_optimizers():
    model, other = net(), net()
    matrices, rest = groups_of(other)
    references = [
        torch.optim.Muon(matrices, **RATES, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    ]
    run_net(model, [mixed(model)], 5)
    run_net(other, references, 5)
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@EVERY_FORMAT
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_model_and_optimizer_trains_on_by_itself(way, dtype, options):
    model = net(dtype)
    optimizer = mixed(model, **uncompiled(options), seed=3)
    run_net(model, [optimizer], 2)
    copied, its_optimizer = COPIES[way]((model, optimizer))
    run_net(copied, [its_optimizer], 2, start=2)
    run_net(model, [optimizer], 2, start=2)
    for (name, want), got in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert_equal(got, want, name)
    its_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "muon": True})
    assert its_optimizer.param_groups[-1]["momentum"] == 0.95


@EVERY_FORMAT
def test_a_saved_state_continues_with_the_same_bits(dtype, options):
    model = net(dtype)
    optimizer = mixed(model, **uncompiled(options), seed=3)
    run_net(model, [optimizer], 2)
    other = net(dtype)
    other.load_state_dict(model.state_dict())
    resumed = mixed(other, **uncompiled(options), seed=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_net(other, [resumed], 2, start=2)
    run_net(model, [optimizer], 2, start=2)
    for (name, want), got in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_equal(got, want, name)


@EVERY_FORMAT
def test_the_result_does_not_depend_on_what_is_updated_together(dtype, options):
    """As layer-major execution does it: one parameter after the other, the last one first."""
    whole, parts = net(dtype), net(dtype)
    at_once, one_by_one = mixed(whole, **uncompiled(options)), mixed(parts, **uncompiled(options))
    for step in range(3):
        backward(whole, step)
        grads = [param.grad.float() for param in whole.parameters()]
        at_once.step()
        at_once.zero_grad()
        for param, grad in reversed(list(zip(parts.parameters(), grads, strict=True))):
            one_by_one.step_params([param], [grad])
    for (name, want), got in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert_equal(got[1], want, name)


def test_gradient_release():
    """Each parameter updated, and its gradient freed, as soon as backward has it."""
    whole, released = net(), net()
    run_net(whole, [mixed(whole)], 3)
    optimizer = mixed(released)

    def update(param):
        optimizer.step_params([param])
        param.grad = None

    for param in released.parameters():
        param.register_post_accumulate_grad_hook(update)
    for step in range(3):
        backward(released, step)
    for (name, want), got in zip(whole.named_parameters(), released.parameters(), strict=True):
        assert_equal(got, want, name)


def test_closure_schedule_and_rate_as_a_tensor():
    ours, other = nn.Parameter(normal(5, 4)), nn.Parameter(normal(5, 4))
    for param, optimizer in ((ours, muon(ours)), (other, theirs(other))):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def compute(param=param, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (param**4).sum()
            loss.backward()
            return loss

        for _ in range(4):
            with torch.no_grad():
                assert optimizer.step(compute).isfinite()
            schedule.step()
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


def test_an_update_that_finds_no_memory_is_done_whole_or_not_at_all(monkeypatch):
    model = net()
    optimizer = mixed(model)
    backward(model, 0)
    before = [param.detach().clone() for param in model.parameters()]
    calls = []

    run = optimizer.kernels.newton_schulz("cpu")

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return run(*arguments)

    monkeypatch.setattr(optimizer.kernels, "newton_schulz", lambda device_type: fails)
    with pytest.raises(MemoryError):
        optimizer.step()
    changed = {name for (name, param), old in zip(model.named_parameters(), before, strict=True)
               if not torch.equal(param, old)}  # fmt: skip
    assert changed == {name for name, param in model.named_parameters() if param.grad is None}
    optimizer.step()  # what has a gradient still
    monkeypatch.undo()
    whole = net()
    run_net(whole, [mixed(whole)], 1)
    for (name, want), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert_equal(got, want, name)


# ---- refused, in words ----


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2, 2)])
def test_what_is_no_matrix_is_refused(shape):
    optimizer = muon(nn.Parameter(normal(3, 3)))
    with pytest.raises(ConfigError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(shape))], "muon": True})
    assert_in_words(caught.value, str(shape), "[R, C]", '"muon"')
    assert len(optimizer.param_groups) == 1, "a refused group stays"


def test_a_vector_that_was_moved_into_a_group_of_muon_is_refused():
    vector = nn.Parameter(torch.ones(3))
    optimizer = muon(nn.Parameter(normal(3, 3)))
    optimizer.param_groups[0]["params"].append(vector)
    vector.grad = torch.ones(3)
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert_in_words(caught.value, "(3,)")


def test_states_of_the_other_law_are_refused_and_nothing_is_loaded():
    param = nn.Parameter(normal(4, 4))
    adam, ours = DeepSeekAdam([param], **RATES), muon(param)
    train(adam, param, grads_of(param))
    train(ours, param, grads_of(param))
    for source, cls in ((adam, muon), (ours, lambda p: DeepSeekAdam([p], **RATES))):
        target = cls(nn.Parameter(normal(4, 4)))
        groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in target.param_groups])
        with pytest.raises(CheckpointError) as caught:
            target.load_state_dict(source.state_dict())
        assert_in_words(caught.value, "Muon", "AdamW")
        assert not target.state
        assert [{k: v for k, v in group.items() if k != "params"} for group in target.param_groups] == groups


@pytest.mark.parametrize(("shape", "chunk"), [((40, 128), 640), ((7, 300), 256), ((3, 5000), 2**24)])
def test_elements_that_are_rounded_at_a_time_change_no_bit(monkeypatch, shape, chunk):
    """A GPU takes more of them than a CPU."""
    from tilewright.optim import muon_update

    def updated():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(shape).bfloat16())
        optimizer = Muon([{"params": [weight], "muon": True}], lr=0.1, moments="8bit")
        for _ in range(2):
            weight.grad = torch.randn(shape).bfloat16()
            optimizer.step()
        return weight.detach().clone()

    assert muon_update.GPU_CHUNK > muon_update.CHUNK
    want = updated()
    monkeypatch.setattr(muon_update, "CHUNK", chunk)
    assert torch.equal(updated(), want)
