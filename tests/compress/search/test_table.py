"""The latency table: which calls are timed, when they are timed again, and costs that are counted."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.models.shapes import MIXED, SHAPES, make_decoder
from tilewright.compress.budget.call_seconds import Seconds, measure, measure_beside
from tilewright.compress.search.library.layer_parts import PARTS, PartPlace, joined, places
from tilewright.compress.search.library.replacement_choices import choices_at
from tilewright.compress.search.search_settings import KINDS, MEASURES
from tilewright.compress.search.table import latency_table
from tilewright.compress.search.table.choice_costs import costs_of, measured_costs, rest_of, shape_key
from tilewright.compress.search.table.latency import Latency, TimedCalls, model_calls, part_calls


def clock_of(durations):
    """A clock on which calls take these seconds, over and over."""
    now, turns = [0.0], itertools.cycle(durations)
    ticks = itertools.count()

    def clock():
        now[0] += next(turns) if next(ticks) % 2 else 0.0
        return now[0]

    return clock


def test_a_steady_call_is_measured_once():
    calls = []
    found = measure(lambda: calls.append(1), clock_of([1.0, 1.02]))
    assert found.least == pytest.approx(1.0)
    assert found.steady
    assert len(calls) == 1 + 9


def test_an_unsteady_call_is_measured_again_and_then_said():
    calls = []
    found = measure(lambda: calls.append(1), clock_of([1.0, 2.0, 2.0]))
    assert not found.steady
    assert found.spread == pytest.approx(1.0)
    assert len(calls) == 1 + 3 * 9
    late = measure(lambda: None, clock_of([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, *[1.0] * 9]))
    assert late.steady
    assert late.least == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["gqa", "mla_q_rank", "own_moe"])
def test_each_cost_of_the_run_is_the_sum_of_its_parts_and_the_rest(name):
    """With a clock that ticks the same for all, what is counted holds to the last parameter and byte."""
    model = make_decoder(name).eval()
    config, context = model.config, 8
    clock = clock_of([1e-3])
    table = {}
    choices = {place: choices_at(config, place, KINDS) for place in places(config)}
    for place, found in choices.items():
        for choice in found:
            if choice.shape is not None and shape_key(config, place, choice.shape) not in table:
                calls = part_calls(config, place.layer, choice.shape, model.kernels, stack_bytes=0, context=context)
                row = calls.latency(clock).to_json() | {"cache": calls.cache}
                table[shape_key(config, place, choice.shape)] = row
    own = {place: costs_of(config, place, found[0], table, context) for place, found in choices.items()}
    one = Seconds(0.5, 0.0, True)
    whole = measured_costs(model, Latency(one, one), model_calls(model, context).cache, context)
    rest = rest_of(whole, own)
    outer = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.blocks.parameters())
    assert rest["parameters"] == outer
    assert rest["flops"] == 2 * config.vocab_size * config.dim
    assert rest["cache"] == 0
    assert set(rest) == set(MEASURES)
    for name in MEASURES:
        assert whole[name] == pytest.approx(rest[name] + sum(costs[name] for costs in own.values()))


def test_a_machine_that_changes_meanwhile_changes_no_latency():
    """It slows to a third between two turns, and what is timed in turns with the run has its share of the run."""
    now, slow, calls = [0.0], [1.0], []

    def lasting(seconds):
        def call():
            now[0] += seconds * slow[0]
            calls.append(seconds)
            slow[0] = 3.0 if len(calls) >= 6 else 1.0

        return call

    known = Seconds(2.0, 0.0, True)
    found = measure_beside(lasting(0.5), lasting(1.0), known, lambda: now[0])
    assert found == Seconds(pytest.approx(1.0), pytest.approx(0.0), True)
    assert calls == [0.5, 1.0] * 6
    run, stack = (TimedCalls(lasting(s), lasting(s / 4), 0, copies) for s, copies in ((1.0, 1), (2.0, 4)))
    shared = stack.latency_beside(run, Latency(known, Seconds(1.0, 0.0, True)), lambda: now[0])
    assert shared == Latency(Seconds(pytest.approx(1.0), 0.0, True), Seconds(pytest.approx(0.5), 0.0, True))


def test_ratios_that_differ_are_measured_again_and_then_said():
    calls = []
    found = measure_beside(
        lambda: calls.append(1), lambda: None, Seconds(1.0, 0.0, True), clock_of([1.0, 1.0, 3.0, 1.0])
    )
    assert not found.steady
    assert found.spread > 0.05
    assert len(calls) == 1 + 3 * 5


def test_many_ratios_that_differ_have_a_steady_median():
    """Calls of a few milliseconds, of which each second ratio is a fifth larger: their median is known well."""
    found = measure_beside(lambda: None, lambda: None, Seconds(1.0, 0.0, True), clock_of([1e-3, 1e-3, 1.2e-3, 1e-3]))
    assert found.steady
    assert 1.0 <= found.least <= 1.2
    assert 0 < found.spread < 0.05


def test_shapes_that_differ_are_timed_apart():
    for config in (SHAPES | MIXED).values():
        keys = {}
        for place in places(config):
            for choice in choices_at(config, place, KINDS):
                if choice.shape is not None:
                    keys.setdefault(shape_key(config, place, choice.shape), set()).add(
                        replace(choice.shape, ffn_dim=0, expert_dim=0, shared_dim=0)
                        if place.part == "attention"
                        else (choice.shape.ffn_dim, choice.shape.expert_dim)
                    )
        assert all(len(shapes) == 1 for shapes in keys.values())


def test_a_model_is_timed_with_its_cache_and_left_as_it_was():
    model = make_decoder("gqa").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    model_calls(model, 6).latency(clock_of([1.0]))
    handle.remove()
    assert seen == [6] * 11 + [1] * 10
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert shape_key(model.config, PartPlace(0, "ffn"), model.config.shape) == "ffn 96"


@pytest.mark.parametrize("name", ["gqa", "mla", "own_gqa", "gqa_moe"])
def test_layers_cost_what_they_take_whichever_parts_they_have(name, monkeypatch):
    """On a machine where a layer takes one call and what its parts add: each shape of a layer is predicted exactly, but
    one that is left out, which is counted as a call."""
    config = (SHAPES | MIXED)[name]

    def seconds(shape):
        return 1.0 + 0.25 * shape.num_heads + 0.5 * shape.num_kv_heads + shape.sliding_window / 8 + shape.ffn_dim / 64

    def timed(shape):
        found = Seconds(seconds(shape), 0.0, True)
        return Latency(found, found)

    monkeypatch.setattr(
        latency_table, "part_calls", lambda config, layer, shape, *rest, **others: TimedCalls(shape, shape, 0)
    )
    rows, said = {}, []
    choices = {place: choices_at(config, place, KINDS) for place in places(config)}

    def measure_again():
        return latency_table.measure_table(
            config, None, choices, rows, stack_bytes=0, context=8, timed=lambda calls: timed(calls.prefill),
            is_known=lambda row: row is not None, report=lambda key, latency: said.append(key),
        )  # fmt: skip

    measure_again()
    assert sorted(said) == sorted(rows)
    measure_again()
    assert sorted(said) == sorted(rows)
    for layer, shape in enumerate(config.shapes):
        if not (shape.num_heads and shape.ffn_dim):
            continue
        attention, ffn = (choices[PartPlace(layer, part)] for part in PARTS)
        for one, other in itertools.product(attention, ffn):
            costs = (
                costs_of(config, PartPlace(layer, part), choice, rows, 8)["token"]
                for part, choice in zip(PARTS, (one, other), strict=True)
            )
            whole = joined(one.shape, other.shape)
            assert sum(costs) == pytest.approx(1.0 if whole is None else seconds(whole)), (one.name, other.name)
