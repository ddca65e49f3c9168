"""DynamicScaler in plain loops with any number of optimizers: torch's GradScaler, and FP64 sums, are the references.

A call out of order is an error in words; whatever is not one gives the right numbers.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tests.optim.test_citizen import assert_in_words
from tilewright.core.errors import ConfigError, NumericsError
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.snapshot import ModuleSnapshot

BOUNDS = {"min": 2.0**-80, "max": 2.0**80}


def optimizers(count, shared=False):
    """SGD at rate 1, each over a parameter of its own, and over one more that all of them have."""
    own = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(count)]
    common = [nn.Parameter(torch.zeros(2, dtype=torch.float64))] if shared else []
    return [torch.optim.SGD([param, *common], lr=1.0) for param in own], own + common


# ---- against torch.amp.GradScaler ----

Round = st.lists(st.tuples(st.sampled_from(["rest", "step", "unscale"]), st.booleans()), min_size=3, max_size=3)


def play(scaler, rounds, update):
    """Scales and parameters after each round; in each, some optimizers rest, some overflow."""
    made, params = optimizers(3)
    history = []
    for number, entries in enumerate(rounds):
        if all(turn == "rest" for turn, _ in entries):
            continue
        factors = [torch.inf if overflow else 1.0 + number + place for place, (_, overflow) in enumerate(entries)]
        loss = sum(param.sum() * factor for param, factor in zip(params, factors, strict=True))
        scaler.scale(loss).backward()
        for optimizer, (turn, _) in zip(made, entries, strict=True):
            if turn == "unscale":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_([p for g in optimizer.param_groups for p in g["params"]], 2.5)
        for optimizer, (turn, _) in zip(made, entries, strict=True):
            if turn != "rest":
                scaler.step(optimizer)
        history.append((update(scaler), [param.tolist() for param in params]))
        for optimizer in made:
            optimizer.zero_grad()
    return history


@examples(60)
@given(st.lists(Round, min_size=1, max_size=12), st.integers(1, 3), st.integers(2, 12))
def test_several_optimizers_equal_torchs_grad_scaler(rounds, window, exponent):
    ours = play(DynamicScaler(2.0**exponent, window=window, **BOUNDS), rounds, lambda scaler: scaler.update())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent, growth_interval=window)
    theirs = play(scaler, rounds, lambda scaler: (scaler.update(), scaler.get_scale())[1])
    assert ours == theirs


# ---- any order of calls, against FP64 sums ----

COUNT = 3
Places = st.integers(0, COUNT - 1)
Operation = st.one_of(
    st.tuples(st.just("loss"), st.lists(st.integers(0, COUNT), min_size=1, max_size=3), st.integers(0, 6)),
    st.tuples(st.just("unscale"), Places),
    st.tuples(st.just("step"), Places),
    st.tuples(st.just("clip"), Places),
    st.tuples(st.just("zero"), Places, st.booleans()),
    st.tuples(st.just("update")),
)


class Truth:
    """What gradients and parameters ought to be, without any scale. The last parameter is that of all optimizers."""

    def __init__(self):
        self.params = torch.zeros(COUNT + 1, 2, dtype=torch.float64)
        self.grads = torch.zeros(COUNT + 1, 2, dtype=torch.float64)

    def step(self, place):
        rows = [place, COUNT]
        if bool(self.grads[rows].isfinite().all()):
            self.params[rows] -= self.grads[rows]


def run(operations, window):
    """Play operations on the scaler and on the truth until one is refused; says which."""
    scaler, truth = DynamicScaler(2.0**6, window=window, **BOUNDS), Truth()
    made, params = optimizers(COUNT, shared=True)
    for optimizer in made:  # known from a first round, in which nothing moves
        scaler.scale(sum(param.sum() * 0.0 for param in params)).backward()
        scaler.step(optimizer)
        scaler.update(False)
        for param in params:
            param.grad = None
    for operation, *arguments in operations:
        try:
            if operation == "loss":
                rows, size = arguments
                factor = torch.inf if size == 6 else 1.0 + size
                scaler.scale(sum(params[row].sum() * factor for row in rows)).backward()
                for row in rows:
                    truth.grads[row] += factor
            elif operation == "unscale":
                scaler.unscale_(made[arguments[0]])
            elif operation == "step":
                before = truth.params.clone()
                stepped = scaler.step(made[arguments[0]])
                truth.step(arguments[0])
                assert stepped or torch.equal(before, truth.params)
            elif operation == "clip":  # half of it, which commutes with scaling
                for row in (arguments[0], COUNT):
                    truth.grads[row] *= 0.5
                    if params[row].grad is not None:
                        params[row].grad *= 0.5
            elif operation == "zero":
                made[arguments[0]].zero_grad(set_to_none=arguments[1])
                truth.grads[[arguments[0], COUNT]] = 0.0
            else:
                scaler.update()
        except ConfigError as error:
            assert_in_words(error)
            return operation
        for row, param in enumerate(params):
            assert torch.equal(param.detach(), truth.params[row]), (
                f"parameter {row} is {param.tolist()}, not {truth.params[row].tolist()}, after {operation}"
            )
    return None


@examples(200)
@given(st.lists(Operation, max_size=30), st.integers(1, 2))
def test_any_order_of_calls_gives_true_numbers_or_an_error(operations, window):
    """Scales and losses are small integers times powers of two, so true numbers are exact. One loss in seven
    overflows."""
    run(operations, window)


@st.composite
def proper_rounds(draw):
    """Loops as they ought to be: who has a turn has no gradients when the next round begins. Others may wait."""
    operations = []
    for _ in range(draw(st.integers(1, 8))):
        acts = draw(st.lists(st.sampled_from(["rest", "step", "unscale", "clip"]), min_size=COUNT, max_size=COUNT))
        if all(act == "rest" for act in acts):
            continue
        losses = st.tuples(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=3), st.integers(0, 6))
        operations += [("loss", *loss) for loss in draw(st.lists(losses, min_size=1, max_size=2))]
        operations += [("unscale", place) for place, act in enumerate(acts) if act in ("unscale", "clip")]
        operations += [("clip", place) for place, act in enumerate(acts) if act == "clip"]
        operations += [("step", place) for place in draw(st.permutations(range(COUNT))) if acts[place] != "rest"]
        zeros = [("zero", place, draw(st.booleans())) for place, act in enumerate(acts) if act != "rest"]
        operations += [("update",), *zeros] if draw(st.booleans()) else [*zeros, ("update",)]
    return operations


@examples(100)
@given(proper_rounds(), st.integers(1, 2))
def test_no_proper_loop_is_refused(operations, window):
    """Whichever optimizers rest, unscale before they step, and however their gradients are set to zero."""
    assert run(operations, window) is None


# ---- calls out of order ----


def one(scale=8.0):
    made, params = optimizers(2, shared=True)
    scaler = DynamicScaler(scale)
    scaler.scale(sum(param.sum() for param in params)).backward()
    return scaler, made, params


def step_twice(scaler, made, params):
    scaler.step(made[0])
    scaler.step(made[0])


def forgotten_update(scaler, made, params):
    """The next round of a loop without `update`."""
    scaler.step(made[0])
    made[0].zero_grad()
    scaler.scale(params[0].sum()).backward()
    scaler.step(made[0])


def unscale_twice(scaler, made, params):
    scaler.unscale_(made[0])
    scaler.unscale_(made[0])


def unscale_after_step(scaler, made, params):
    scaler.step(made[0])
    scaler.unscale_(made[0])


def update_alone(scaler, made, params):
    scaler.update()


def update_twice(scaler, made, params):
    scaler.step(made[0])
    scaler.update()
    scaler.update()


def update_between(scaler, made, params):
    """The second optimizer's gradients have the scale of before."""
    scaler.step(made[0])
    scaler.update()
    scaler.step(made[1])


def loss_not_scaled(scaler, made, params):
    scaler.step(made[0])
    scaler.update()
    params[0].sum().backward()
    scaler.step(made[0])


def parameters_for_an_optimizer(scaler, made, params):
    scaler.unscale_(params)


def added_after_unscaling(scaler, made, params):
    """True gradients and scaled ones in one sum."""
    scaler.unscale_(made[0])
    scaler.scale(params[0].sum()).backward()
    scaler.step(made[0])


def shared_and_clipped(scaler, made, params):
    """Nobody can say whether the gradient is that of before, clipped, or a new one."""
    scaler.unscale_(made[0])
    torch.nn.utils.clip_grad_norm_(params[2:], 0.1)
    scaler.step(made[0])
    scaler.step(made[1])


def closure_needed(scaler, made, params):
    scaler.step(torch.optim.LBFGS(params))


def attempt_without_update(scaler, made, params):
    with scaler.attempt(nn.BatchNorm1d(2)):
        scaler.step(made[0])


MISUSES = (
    *(step_twice, forgotten_update, unscale_twice, unscale_after_step, update_alone, update_twice, update_between),
    *(loss_not_scaled, parameters_for_an_optimizer, added_after_unscaling, shared_and_clipped, closure_needed),
    attempt_without_update,
)


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_calls_out_of_order_are_refused(misuse):
    with pytest.raises(ConfigError, match="out of order") as caught:
        misuse(*one())
    assert_in_words(caught.value, "update()")


def test_a_shared_parameter_is_divided_once():
    scaler, made, params = one()
    for optimizer in made:
        scaler.step(optimizer)
    assert [param.tolist() for param in params] == [[-1.0, -1.0], [-1.0, -1.0], [-2.0, -2.0]]


def test_a_parameter_listed_twice_is_divided_once():
    param = nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([param, param], lr=1.0)
    scaler = DynamicScaler(8.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [1.0, 1.0]


def test_one_of_two_optimizers_overflows():
    """As torch has it, the other one steps. One overflow is counted, however many optimizers saw it."""
    scaler = DynamicScaler(8.0)
    made, params = optimizers(3)
    scaler.scale(params[0].sum() + params[1].sum() * torch.inf + params[2].sum() * torch.nan).backward()
    assert [scaler.step(optimizer) for optimizer in made] == [True, False, False]
    assert scaler.update() == 4.0
    assert (scaler.skipped, scaler.steps) == (1, 1)
    assert [param.tolist() for param in params] == [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]


def test_an_optimizer_that_steps_every_other_round():
    """Its gradients add up over a change of the scale."""
    scaler = DynamicScaler(8.0, window=1)
    made, params = optimizers(2)
    for number in range(7):
        scaler.scale((params[0].sum() + params[1].sum()) * (number + 1.0)).backward()
        scaler.step(made[0])
        if number % 2 == 0:
            scaler.step(made[1])
            made[1].zero_grad()
        scaler.update()
        made[0].zero_grad()
    assert scaler.scale_value == 8.0 * 2**7
    assert params[0].tolist() == [-28.0, -28.0]
    assert params[1].tolist() == [-28.0, -28.0]


def test_a_step_that_fails_can_be_called_again():
    scaler, made, params = one()
    real, made[0].step = made[0].step, lambda: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(MemoryError):
        scaler.step(made[0])
    made[0].step = real
    assert scaler.step(made[0])
    assert params[0].tolist() == [-1.0, -1.0]


def test_sparse_gradients():
    table, want = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2)
    want.load_state_dict(table.state_dict())
    scaler = DynamicScaler(2.0**10)
    optimizer, reference = (torch.optim.SGD(module.parameters(), lr=0.5) for module in (table, want))
    for rows in ([1, 1, 3], [0, 3, 3]):
        scaler.scale(table(torch.tensor(rows)).square().sum()).backward()
        want(torch.tensor(rows)).square().sum().backward()
        assert scaler.step(optimizer)
        reference.step()
        scaler.update()
        optimizer.zero_grad()
        reference.zero_grad()
        torch.testing.assert_close(table.weight, want.weight)
    scaler.scale(table(torch.tensor([2])).sum() * torch.inf).backward()
    assert not scaler.step(optimizer)


def test_fp16_gradients_are_refused():
    """As torch refuses them: a gradient that the scale has saved would be lost again."""
    layer = nn.Linear(3, 2).half()
    scaler, optimizer = DynamicScaler(2.0**10), torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(1, 3, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ConfigError) as caught:
        scaler.step(optimizer)
    assert_in_words(caught.value, "FP16 gradients", "grad_dtype")
    optimizer.zero_grad()
    for param in layer.parameters():
        param.grad_dtype = torch.float32
    scaler.scale(layer(torch.full((1, 3), 2.0**-10, dtype=torch.float16)).sum() * 2.0**-20).backward()
    scaler.unscale_(optimizer)
    assert layer.weight.grad.tolist() == [[2.0**-30] * 3] * 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_begins_between_two_steps(duplicate):
    scaler, made, _ = one()
    scaler.step(made[0])
    other = duplicate(scaler)
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(ConfigError, match="out of order"):
        other.step(made[1])
    scaler.step(made[1])
    assert scaler.update() == 8.0


# ---- what a skipped step leaves in the model ----


def batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, numbers, bad=()):
    scaler = DynamicScaler(2.0**10)
    for number in numbers:
        with scaler.attempt(model):
            x = rows(number) * (torch.inf if number in bad else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return scaler


def test_a_loop_with_overflows_equals_one_that_never_saw_those_batches():
    bad = (0, 3, 4)
    model, optimizer = batch_norm()
    scaler = train(model, optimizer, range(7), bad)
    reference, its_optimizer = batch_norm()
    train(reference, its_optimizer, [number for number in range(7) if number not in bad])
    assert scaler.skipped == len(bad)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m)


def test_an_overflow_at_the_least_scale_leaves_nothing_behind_either():
    model, optimizer = batch_norm()
    before = copy.deepcopy(model.state_dict())
    scaler = DynamicScaler(1.0)
    with pytest.raises(NumericsError), scaler.attempt(model):  # noqa: PT012
        scaler.scale(model(rows(0) * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_models_and_a_step_that_the_loop_skips_by_itself():
    (first, optimizer), (second, _) = batch_norm(), batch_norm()
    before = [copy.deepcopy(model.state_dict()) for model in (first, second)]
    scaler = DynamicScaler(8.0)
    with scaler.attempt(first, second) as notes:
        scaler.scale((first(rows(0)) + second(rows(1))).square().mean()).backward()
        assert not scaler.unscale_(optimizer)
        notes.restore()  # the norm is too large, say
        assert scaler.update() == 8.0
    for model, state in zip((first, second), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_without_a_scaler():
    model, _ = batch_norm()
    before = copy.deepcopy(model.state_dict())
    notes = ModuleSnapshot(model)
    model(rows(0) * torch.nan)
    notes.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
