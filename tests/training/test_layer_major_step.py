"""The layer-major executor: updates on the way back, and the result of the whole batch's gradient nevertheless."""

import copy
import math

import pytest
import torch

from tests.models.shapes import KERNELS, make_batch, make_decoder
from tilewright.core.errors import NumericsError
from tilewright.memory.layer_major.replay_random import Replay
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.activations import ActivationStore
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.delayed_clip import SURGE
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.executor.step_transaction import UnrecoverableStepError

SIZES = (3, 1, 2, 1)
"""Rows of the micro-batches of one step."""
LR = 5e-4


def executor(model, view=None, *, group=1, clip=None, **options):
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), betas=(0.9, 0.95))
    view = view or model
    layer_groups = find_layer_groups(model, view, group)
    return LayerMajorExecutor(model, view, layer_groups, optimizer, clip=clip or GradClip(0.0), **options)


def steps(num=5):
    """Micro-batches of each step, of different rows and targets."""
    made = []
    for step in range(num):
        batch = make_batch(sum(SIZES), 16, seed=step)
        batch["labels"][torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(step)) < 0.3] = -100
        parts = [torch.split(tensor, SIZES) for tensor in batch.values()]
        made.append([dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)])
    return made


def reference(model, made, lr=1e-2, max_norm=0.0, loss=None):
    """torch's AdamW on the mean loss over all targets of a step; norms before clipping."""
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=lr, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for microbatches in made:
        total = sum(int((batch["labels"] != -100).sum()) for batch in microbatches)
        for batch in microbatches:
            ((loss or model.loss)(batch) if loss else model.loss(batch).loss_sum).div(total).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "after_step"):
            model.after_step()
    return norms


def worst(a, b):
    """The largest difference of two models' parameters, and where."""
    rows = [((p.double() - q.double()).abs().max().item(), name) for (name, p), q in zip(
        a.named_parameters(), b.parameters(), strict=True)]  # fmt: skip
    return max(rows)


@pytest.mark.parametrize(("name", "group"), [("gqa", 2), ("tied", 1), ("mla", 1), ("gqa_moe", 5)])
@pytest.mark.support("layer_major", "one")
def test_exact_is_torch_adamw(name, group):
    """FP32, five steps of four uneven micro-batches, clipped: within 1e-6, where AdamW moves by lr = 5e-4 a step."""
    ours, theirs = make_decoder(name).train(), make_decoder(name).train()
    made = steps()
    norms = reference(theirs, made, LR, max_norm=0.5)
    run = executor(ours, group=group, clip=GradClip(0.5))
    results = [run.step(microbatches, LR) for microbatches in made]
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)
    assert all(result.skipped is None for result in results)
    assert all(param.grad is None for param in ours.parameters())


@pytest.mark.parametrize("name", ["tied", "gqa_moe"])
def test_lagged_without_a_bound_is_torch_adamw_from_one_pass(name, monkeypatch):
    """Where neither bound binds, the single pass gives the same weights."""
    monkeypatch.setattr("tilewright.optim.delayed_clip.SURGE", math.inf)
    ours, theirs = make_decoder(name).train(), make_decoder(name).train()
    made = steps()
    norms = reference(theirs, made, LR)
    run = executor(ours, delayed=True)
    results = [run.step(microbatches, LR) for microbatches in made]
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)


def test_it_is_the_standard_executor_to_the_last_bit():
    ours, theirs = make_decoder("gqa_moe").train(), make_decoder("gqa_moe").train()
    run = executor(ours)
    plain = StandardExecutor(theirs, DeepSeekAdam(decay_groups(theirs, 0.1)), clip=GradClip(0.0))
    for microbatches in steps(3):
        a, b = run.step(microbatches, 1e-3), plain.step(microbatches, 1e-3)
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.aux == pytest.approx(b.aux, rel=1e-6)
        assert (a.num_targets, a.num_tokens) == (b.num_targets, b.num_tokens)
    assert worst(ours, theirs)[0] == 0.0, worst(ours, theirs)
    biases = [model.blocks[1].mlp.gate.e_score_correction_bias for model in (ours, theirs)]
    assert torch.equal(*biases)
    assert biases[0].abs().sum() > 0


def test_one_slice_is_alive_at_a_time():
    """What stays from the forward pass are layer inputs; gradients are those of one slice."""
    model = make_decoder("gqa").train()
    run = executor(model)
    seen = []
    real = run.run.layer_groups
    owners = {param: part.name for part in real for param in part.params}

    def look(part, grads):
        seen.append((part.name, {owners[p] for p in model.parameters() if p.grad is not None}))

    update = run._update
    run._update = lambda part, params, grads: (look(part, grads), update(part, params, grads))
    run.step(steps(1)[0], 1e-3)
    assert [name for name, _ in seen] == ["epilogue", "layers.1", "layers.0", "prologue", "shared"]
    assert all(alive <= {name} for name, alive in seen)
    assert run.run.inputs.num_bytes["device"] == 0


def test_frozen_parameters_stay():
    ours, theirs = make_decoder("gqa").train(), make_decoder("gqa").train()
    for model in (ours, theirs):
        model.model.embed_tokens.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    made = steps(2)
    reference(theirs, made, LR)
    run = executor(ours)
    for microbatches in made:
        run.step(microbatches, LR)
    assert worst(ours, theirs)[0] <= 1e-6


# ---- bad numbers ----


class Poison(torch.autograd.Function):
    """Leaves a value as it is, and makes its gradient `factor` times as large."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def poison(model, layer, factor):
    """The gradient that leaves layer `layer` backwards is multiplied by `factor[0]`."""
    model.blocks[layer].register_forward_pre_hook(lambda _, args: (Poison.apply(args[0], factor[0]), *args[1:]))


def snapshot(model, optimizer):
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + [v.clone() for p in model.parameters() for v in optimizer.state[p].values()]


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e12])
@pytest.mark.parametrize("how", ["exact", "journal"])
def test_a_bad_gradient_in_the_middle_changes_nothing(how, factor):
    model, factors = make_decoder("gqa").train(), [1.0]
    poison(model, 1, factors)
    options = {} if how == "exact" else {"delayed": True, "rollback_buffer": RollbackBuffer("host", "cpu")}
    run = executor(model, clip=GradClip(1.0), **options)
    first, second, third = steps(3)
    assert run.step(first, 1e-2).skipped is None
    before = snapshot(model, run.optimizer)
    state = run.delayed.state_dict() if run.delayed else None
    factors[0] = factor
    result = run.step(second, 1e-2)
    assert result.skipped
    assert math.isfinite(factor) or "not finite" in result.skipped
    after = snapshot(model, run.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert state is None or run.delayed.state_dict() == state
    factors[0] = 1.0
    assert run.step(third, 1e-2).skipped is None


def test_without_a_journal_a_lost_step_is_an_error_of_its_own():
    model = make_decoder("gqa").train()
    poison(model, 1, [math.nan])
    run = executor(model, delayed=True)
    with pytest.raises(
        UnrecoverableStepError, match="Non-finite gradient during backward, after some layers were updated"
    ):
        run.step(steps(1)[0], 1e-2)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_bad_loss_or_output_begins_no_update(delayed):
    model = make_decoder("gqa").train()
    run = executor(model, delayed=delayed)
    first, second = steps(2)
    run.step(first, 1e-2)
    with torch.no_grad():
        model.blocks[0].mlp.down_proj.weight[0, 0] = math.nan
    before = snapshot(model, run.optimizer)
    result = run.step(second, 1e-2)
    assert "not finite" in result.skipped
    after = snapshot(model, run.optimizer)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))
    assert run.step(second, 1e-2).skipped == result.skipped
    with pytest.raises(NumericsError, match="3 steps in a row"):
        run.step(second, 1e-2)


# ---- delayed clipping ----


def test_lagged_bounds_by_the_norm_of_the_step_before(monkeypatch):
    """Step 2 is scaled by bound / norm of step 1: seen on the first moment, which is linear in the gradient."""
    monkeypatch.setattr("tilewright.optim.delayed_clip.SURGE", math.inf)
    bound = 0.3
    model, twin = make_decoder("gqa").train(), make_decoder("gqa").train()
    run, free = executor(model, delayed=True, clip=GradClip(bound)), executor(twin, delayed=True)
    first, second = steps(2)
    norm = run.step(first, 0.0).grad_norm
    free.step(first, 0.0)
    assert norm > bound
    moments = [[run_.optimizer.state[p]["exp_avg"].clone() for p in m.parameters()] for run_, m in (
        (run, model), (free, twin))]  # fmt: skip
    results = [run.step(second, 0.0), free.step(second, 0.0)]
    assert results[0].grad_norm == results[1].grad_norm, "told is the true norm"
    for p, q, m, f in zip(model.parameters(), twin.parameters(), *moments, strict=True):
        scaled = run.optimizer.state[p]["exp_avg"] - 0.9 * m
        plain = free.optimizer.state[q]["exp_avg"] - 0.9 * f
        torch.testing.assert_close(scaled, plain * (bound / norm), rtol=1e-4, atol=1e-9)


def test_lagged_holds_a_surge_that_the_norm_before_knows_nothing_of():
    """A gradient 10,000 times the usual moves no tensor's gradient beyond twice its usual length."""
    model, factors = make_decoder("gqa").train(), [1.0]
    poison(model, 1, factors)
    run = executor(model, delayed=True, clip=GradClip(1.0, threshold=1e9))
    seen = {}
    update = run._update
    run._update = lambda part, params, grads: (
        seen.update({p: float(g.norm()) for p, g in zip(params, grads, strict=True)}),
        update(part, params, grads),
    )
    made = steps(6)
    usual = []
    for microbatches in made[:5]:
        run.step(microbatches, 1e-4)
        usual.append(dict(seen))
    factors[0] = 1e4
    assert run.step(made[5], 1e-4).grad_norm > 100
    assert all(seen[p] <= SURGE * max(row[p] for row in usual) * 1.0001 for p in seen)


# ---- random numbers ----


def layer_major_by_autograd(model, made, lr):
    """All micro-batches through a layer, then the next, by plain autograd that keeps everything."""
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=lr, betas=(0.9, 0.95), eps=1e-8)
    for microbatches in made:
        total = sum(int((batch["labels"] != -100).sum()) for batch in microbatches)
        starts = [model.prologue(batch) for batch in microbatches]
        xs = [x for x, _ in starts]
        for index in range(len(model.blocks)):
            xs = [model.layer(index, x, context)[0] for x, (_, context) in zip(xs, starts, strict=True)]
        rows = zip(xs, starts, microbatches, strict=True)
        sum(model.epilogue(x, context, batch).loss_sum for x, (_, context), batch in rows).div(total).backward()
        optimizer.step()
        optimizer.zero_grad()


class Dropped(torch.nn.Module):
    """A module behind dropout."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return torch.nn.functional.dropout(self.inner(*args), 0.2, self.training)


@pytest.mark.parametrize("delayed", [False, True])
def test_dropout_draws_the_same_numbers_again(delayed, monkeypatch):
    monkeypatch.setattr("tilewright.optim.delayed_clip.SURGE", math.inf)
    ours = make_decoder("gqa").train()
    ours.model.embed_tokens = Dropped(ours.model.embed_tokens)
    ours.model.norm = Dropped(ours.model.norm)
    for block in ours.blocks:
        block.mlp, block.self_attn.o_proj = Dropped(block.mlp), Dropped(block.self_attn.o_proj)
    theirs = copy.deepcopy(ours)
    made = steps(3)
    run = executor(ours, delayed=delayed)
    torch.manual_seed(5)
    for microbatches in made:
        run.step(microbatches, LR)
    ended = torch.get_rng_state()
    torch.manual_seed(5)
    layer_major_by_autograd(theirs, made, LR)
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)
    assert torch.equal(ended, torch.get_rng_state()), "generators are where one pass leaves them"


# ---- experts and 8-bit inputs ----


def test_experts_are_those_of_the_forward_pass():
    """From inputs in 8 bits a router would choose other experts for some tokens; it takes the first choice."""
    model = make_decoder("gqa_moe").train()
    gate, chosen, afresh = model.blocks[1].mlp.gate, [], []

    def look(router, args, out):
        chosen.append(out[1])
        afresh.append(router._choose(router.kernels.linear(args[0].float(), router.weight).sigmoid()))

    gate.register_forward_hook(look)
    run = executor(model, inputs=ActivationStore("device", "cpu", "fp8", kernels=KERNELS), delayed=True)
    run.step(steps(1)[0], LR)
    forward, backward = chosen[: len(SIZES)], chosen[len(SIZES) :]
    assert len(forward) == len(backward) == len(SIZES)
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(forward, afresh[len(SIZES) :], strict=True)), (
        "else this is no test"
    )


class ForeignExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        values, indices = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        outs = torch.stack([expert(x) for expert in self.experts], -2)
        return (values[..., None] * outs.gather(-2, indices[..., None].expand(*indices.shape, 8))).sum(-2)


def test_choices_of_foreign_routers_are_replayed():
    """At `torch.topk`, in whatever module it is called."""
    layer = ForeignExperts()
    replay, scores = Replay("cpu"), torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    first = replay.record("key", layer, lambda: torch.topk(scores, 2, dim=-1))
    again = replay.replay("key", layer, lambda: (1 - scores).topk(2, dim=-1))
    assert first.indices.tolist() == again.indices.tolist() == [[1, 2]]
    torch.testing.assert_close(again.values, torch.tensor([[0.6, 0.7]]))


def test_eight_bit_products_follow_their_weights():
    """FP8 codes of a slice are made again at its update: three steps equal those of the standard executor."""
    ours, theirs = make_decoder("gqa").train(), make_decoder("gqa").train()
    runs = []
    for model in (ours, theirs):
        convert(model, "fp8_tile")
        optimizer = DeepSeekAdam(decay_groups(model, 0.1))
        qdata = QuantizedWeights(model, optimizer)
        if model is ours:
            layer_groups = find_layer_groups(model, model)
            runs.append(LayerMajorExecutor(model, model, layer_groups, optimizer, clip=GradClip(0.0), weights=qdata))
        else:
            runs.append(StandardExecutor(model, optimizer, clip=GradClip(0.0)))
    for microbatches in steps(3):
        losses = [run.step(microbatches, 1e-2).loss for run in runs]
        assert losses[0] == losses[1]
    assert worst(ours, theirs)[0] == 0.0, worst(ours, theirs)
