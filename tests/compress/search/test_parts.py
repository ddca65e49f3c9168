"""Replacements of parts: which there are, weights they begin with, what they cost alone, and decoders of them."""

import json

import pytest
import torch

from tests.models.shapes import MIXED, SHAPES, make_batch, make_decoder
from tilewright.compress.budget.held_out_rise import row_losses_of
from tilewright.compress.search.library.assemble_decoder import assembled, config_with
from tilewright.compress.search.library.layer_parts import own_part, places, run_part
from tilewright.compress.search.library.replacement_choices import NONE, choices_at, why_whole
from tilewright.compress.search.library.replacement_scores import as_computed, own_losses, score_choices
from tilewright.compress.search.library.start_weights import PartData, fit_last, last_layer
from tilewright.compress.search.library.train_replacements import (
    key_of,
    part_at,
    relative_error,
    save_part,
    train_library,
)
from tilewright.compress.search.search_settings import KINDS
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_flops, count_parameters
from tilewright.models.decoder.hf_config import read_config
from tilewright.models.decoder.hf_weights import load_weights, save_decoder

_LAYERS = ({"attention": "linear"}, {"num_heads": 2, "attention": "linear", "ffn_dim": 0}, {"num_kv_heads": 1})
_BASE = {"vocab_size": 61, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96, "tie_embeddings": False}
LINEAR = {"own_linear": DecoderConfig.of(**_BASE, num_layers=3, layers=_LAYERS)}
ALL = SHAPES | MIXED | LINEAR


def every_choice(config):
    return {place: choices_at(config, place, KINDS, 16) for place in places(config)}


def own_choices(config):
    return {place: found[0] for place, found in every_choice(config).items()}


def trained(model, folder, steps=0):
    """The library of a model, and its rows."""
    rows, choices = {}, every_choice(model.config)
    batches = [make_batch(rows=8, seed=seed) for seed in range(3)]
    train_library(model, batches, choices, folder, steps=steps, seed=0, done=rows.__contains__, report=rows.__setitem__)
    return choices, rows


@pytest.mark.parametrize("name", ALL)
def test_parts_of_the_run_behind_each_other_are_the_run(name):
    """Loss to the bit; and the decoder of its own parts is itself."""
    model = make_decoder(ALL[name]).eval()
    batch = make_batch()
    with torch.no_grad():
        x, context = model.prologue(batch)
        for place in places(model.config):
            x = run_part(own_part(model, place), x, context)
        assert torch.equal(model.epilogue(x, context, batch).loss_sum, model.loss(batch).loss_sum)
        made = assembled(model, own_choices(model.config), None)
    assert made.config == model.config
    assert all(torch.equal(made.state_dict()[key], value) for key, value in model.state_dict().items())
    ours = {tensor.data_ptr() for tensor in model.parameters()}
    assert not ours & {tensor.data_ptr() for tensor in made.parameters()}


def test_choices_are_smaller_and_each_once():
    for config in ALL.values():
        for place, found in every_choice(config).items():
            assert len({choice.name for choice in found}) == len(found)
            for choice in found[1:]:
                made = config_with(config, own_choices(config) | {place: choice})
                if choice.name != "linear":  # which has gates, and saves on long rows
                    assert count_flops(made, 16).forward < count_flops(config, 16).forward
                    assert count_parameters(made).total <= count_parameters(config).total
            assert (why_whole(config, place, KINDS, found) is None) == any(choice.trained for choice in found)
            assert why_whole(config, place, ("none",), found[:1]) is None
            assert (why_whole(config, place, ("ffn",), found[:1]) is None) == (place.part == "attention")


@pytest.mark.parametrize("name", ["gqa", "mla_q_rank", "own_moe", "own_linear"])
def test_units_that_give_nothing_can_be_cut_for_nothing(name, tmp_path):
    """With half of all units at zero in the run, the half cut begins without an error: the right ones were kept."""
    model = make_decoder(ALL[name]).eval()
    halves = {}
    for place, found in every_choice(model.config).items():
        own = own_part(model, place)
        for choice in found:
            total = last_layer(own).in_features if choice.how == "cut" else 0
            whole = own.mlp.down_proj.in_features if place.part == "ffn" and total else None
            units = whole or model.config.at(place.layer).num_heads
            if total and abs(2 * choice.units - (whole or units // (units // _units(model, place)))) < 2:
                halves[place] = choice
    assert halves
    with torch.no_grad():
        for place, choice in halves.items():
            last = last_layer(own_part(model, place))
            width = last.in_features // (last.in_features if place.part == "ffn" else _units(model, place))
            kept = torch.randperm(last.in_features // width)[: choice.units]
            mask = torch.zeros(last.in_features // width).index_fill_(0, kept, 1.0).repeat_interleave(width)
            last.weight.mul_(mask)
    rows = {}
    batches = [make_batch(rows=8, seed=seed) for seed in range(3)]
    chosen = {place: [choice] for place, choice in halves.items()}
    with_all = {place: chosen.get(place, []) for place in places(model.config)}
    train_library(model, batches, with_all, tmp_path, steps=0, seed=0, done=rows.__contains__, report=rows.__setitem__)
    assert len(rows) == len(halves)
    assert all(row.error < 1e-9 for row in rows.values()), rows


def _units(model, place):
    config = model.config.at(place.layer)
    return config.num_heads if config.attention == "mla" else config.num_kv_heads


def test_equal_heads_are_merged_for_nothing(tmp_path):
    model = make_decoder("gqa").eval()
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.self_attn.k_proj.weight, block.self_attn.v_proj.weight):
                weight.copy_(weight[: len(weight) // 2].repeat(2, 1))
    choices, rows = trained(model, tmp_path)
    merged = [key_of(place, one) for place, found in choices.items() for one in found if one.how == "merge"]
    assert len(merged) == model.config.num_layers
    assert all(rows[key].error < 1e-9 for key in merged)


def test_a_replacement_that_fits_is_not_trained(tmp_path):
    """Half of the FFN's channels give nothing: the half without them has the same weights however many steps there
    are, others have not."""
    model = make_decoder("gqa").eval()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.down_proj.weight[:, ::2] = 0.0
    rows = [trained(model, tmp_path / str(steps), steps)[1] for steps in (0, 8)]
    fits = {key for key, row in rows[0].items() if row.fitted < 0.01}
    assert {"0.ffn.ffn-64"} <= fits < set(rows[0])
    for key in rows[0]:
        first, second = ((tmp_path / steps / f"{key}.safetensors").read_bytes() for steps in ("0", "8"))
        assert rows[0][key].fitted == rows[1][key].fitted
        assert first == second or key not in fits
    assert any(rows[1][key].error < rows[1][key].fitted for key in set(rows[1]) - fits)


def test_the_last_layer_is_the_least_squares_of_its_inputs():
    """Beside torch's solver, on what a part reads; the pull to the old weights is a thousandth."""
    model = make_decoder("gqa").eval()
    place = list(places(model.config))[1]
    own = own_part(model, place)
    with torch.no_grad():
        pairs = [model.prologue(make_batch(seed=seed, rows=16)) for seed in range(2)]
        data = PartData([x for x, _ in pairs], [run_part(own, *pair) for pair in pairs], [c for _, c in pairs])
        made = part_at(model, place, choices_at(model.config, place, KINDS)[0], None)
        made.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, assign=True)
        made.mlp.up_proj.weight.mul_(1 + 0.3 * torch.randn_like(made.mlp.up_proj.weight))
        before = relative_error(made, data)
        read = torch.cat([made.mlp.kernels.swiglu(made.mlp.gate_proj(n), made.mlp.up_proj(n)).flatten(0, 1)
                          for n in (made.post_attention_layernorm(x) for x in data.inputs)])  # fmt: skip
        wanted = torch.cat([(o - x).flatten(0, 1) for x, o in zip(data.inputs, data.outputs, strict=True)])
        best = torch.linalg.lstsq(read.double(), wanted.double()).solution
        least = float((read.double() @ best - wanted.double()).square().sum() / wanted.double().square().sum())
        fit_last(made, data)
    after = relative_error(made, data)
    assert least <= after <= 1.05 * least + 1e-3 < before


def test_training_makes_replacements_nearer_and_resumes(tmp_path):
    """None is worse than what it began with; a file that is gone is made again to the bit, others are not touched."""
    model = make_decoder("gqa").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, rows = trained(model, tmp_path, steps=8)
    assert all(row.error <= row.begun for row in rows.values())
    assert sum(row.error < row.begun for row in rows.values()) > len(rows) / 2
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert len(files) == len(rows)
    gone = sorted(files)[3]
    gone.unlink()
    (tmp_path / "1.ffn.ffn-32.partial").write_bytes(b"half of one")
    again = {key: row for key, row in rows.items() if key != gone.name.removesuffix(".safetensors")}
    train_library(
        model, [make_batch(rows=8, seed=seed) for seed in range(3)], every_choice(model.config), tmp_path,
        steps=8, seed=0,
        done=again.__contains__, report=again.__setitem__,
    )  # fmt: skip
    assert gone.read_bytes() == files[gone][0]
    assert all(path.stat().st_mtime_ns == files[path][1] for path in files if path != gone)


@pytest.mark.parametrize(("name", "mode"), [("own_linear", "fp32"), ("own_moe", "fp32"), ("own_linear", "bf16_mixed")])
def test_scores_are_losses_of_the_decoders_with_one_replacement(name, mode, tmp_path):
    """Of each part the first and the last one, put together as a whole and evaluated."""
    model = make_decoder(ALL[name]).eval()
    choices, _ = trained(model, tmp_path)
    held = {"a": [make_batch(seed=7)], "b": [make_batch(seed=8), make_batch(seed=9)]}
    found = {}
    score_choices(model, held, choices, tmp_path, mode=mode, done=found.__contains__, report=found.__setitem__)
    for place, of_place in choices.items():
        for choice in of_place[1 :: max(1, len(of_place) - 2)]:
            made = assembled(model, own_choices(model.config) | {place: choice}, tmp_path)
            expected = row_losses_of(as_computed(made, mode), held)
            near = 1e-6 if mode == "fp32" else 1e-3  # BF16 has 8 bits
            assert found[key_of(place, choice)].by_domain() == pytest.approx(expected.by_domain(), rel=near)
    assert len(found) == sum(len(of_place) - 1 for of_place in choices.values())
    whole = row_losses_of(as_computed(model, mode), held)
    assert own_losses(model, held, mode).by_domain() == pytest.approx(whole.by_domain(), rel=near)


def test_a_replacement_whose_loss_is_not_finite_has_no_score(tmp_path):
    """The others have."""
    model = make_decoder("gqa").eval()
    choices, _ = trained(model, tmp_path)
    place, of_place = next(iter(choices.items()))
    bad = key_of(place, of_place[1])
    part = part_at(model, place, of_place[1], tmp_path)
    with torch.no_grad():
        next(part.parameters()).fill_(torch.nan)
    save_part(part, tmp_path, bad)
    found = {}
    held = {"a": [make_batch(seed=7)]}
    score_choices(model, held, {place: of_place}, tmp_path, done=found.__contains__, report=found.__setitem__)
    assert [key for key, losses in found.items() if losses is None] == [bad]


@pytest.mark.parametrize("name", ALL)
def test_layers_with_neither_part_are_left_out(name, tmp_path):
    """The stream passes them as they are; tilewright's own folder holds what is left, to the bit."""
    model = make_decoder(ALL[name]).eval()
    chosen = own_choices(model.config)
    gone = model.config.num_layers - 1
    for place, found in every_choice(model.config).items():
        if place.layer == gone:
            chosen[place] = next(choice for choice in found if choice.name == NONE)
    made = assembled(model, chosen, tmp_path)
    assert made.config.num_layers == model.config.num_layers - 1
    batch = make_batch()
    with torch.no_grad():
        x, context = model.prologue(batch)
        for layer in range(gone):
            x, _ = model.layer(layer, x, context)
        assert torch.equal(made.loss(batch).loss_sum, model.epilogue(x, context, batch).loss_sum)
    save_decoder(made, tmp_path / "own", own_layout=True)
    read = Decoder(config := read_config(tmp_path / "own"), made.kernels)
    assert config == made.config
    load_weights(read, tmp_path / "own")
    with torch.no_grad():
        assert torch.equal(read.loss(batch).loss_sum, made.loss(batch).loss_sum)


@pytest.mark.parametrize("name", ALL)
def test_what_a_recipe_says_of_a_shape_is_the_shape(name):
    config = ALL[name]
    assert DecoderConfig.of(config.vocab_size, **config.section_values()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": "61"},
        {"vocab_size": 0},
        {"model": [1]},
        {"model": {"kind": "os:system"}},
        {"model": {"path": "/etc"}},
        {"model": {"dim": "wide"}},
        {"model": {"num_heads": 4, "layers": [{"num_heads": 3, "num_kv_heads": 2}]}},
    ],
)
def test_folders_that_hold_no_shape_are_refused(changes, tmp_path):
    """In four parts; and nothing that they name is imported or opened."""
    save_decoder(make_decoder("own_gqa"), tmp_path, own_layout=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises((CheckpointError, ConfigError)) as error:
        read_config(tmp_path)
    assert all((problem.got and problem.need and problem.try_) for problem in error.value.problems)


def test_a_damaged_replacement_is_named(tmp_path):
    model = make_decoder("gqa").eval()
    choices, _ = trained(model, tmp_path)
    place, found = next(iter(choices.items()))
    choice = next(one for one in found if one.trained)
    path = tmp_path / f"{key_of(place, choice)}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="Replacement of a layer cannot be read") as error:
        part_at(model, place, choice, tmp_path)
    assert f"rm {path}" in error.value.problems[0].try_
