"""What a cut leaves: parameters are known from shapes alone, and layers that are not alike are not taken for others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.prune.models import FOREIGN, batch_of, drawn, ours
from tests.draws import examples
from tests.models.shapes import KERNELS
from tilewright.compress.budget.held_out_rise import row_losses_of, seconds_beside
from tilewright.compress.budget.sensitivity import sensitivities
from tilewright.compress.prune.cut_model import LayoutError
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.tensors_of_units import parameters_left
from tilewright.core.errors import ConfigError
from tilewright.models.hf.load import load_hf

KINDS = {
    "gqa": ("ffn", "heads", "layers"),
    "tied": ("ffn", "layers"),
    "gqa_moe": ("ffn", "heads", "experts", "expert_channels"),
}


@examples(12)
@given(name=st.sampled_from(list(KINDS)), data=st.data())
def test_parameters_of_cuts_together_are_those_of_the_model_that_they_make(name, data):
    """Kinds may share weights, as layers do with all others: the sum of what each saves alone may be more than all."""
    model = ours(name)
    kinds = data.draw(st.lists(st.sampled_from(KINDS[name]), min_size=1, unique=True))
    shares = {kind: data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])) for kind in kinds}
    made = prune(model, shares, importance="l1", multiple={})
    assert parameters_left(model, made.after) == sum(param.numel() for param in made.model.parameters())


def test_layers_go_and_the_tokens_that_end_a_text_stay():
    """Of three layers one goes; three tokens are no layers."""
    import transformers

    config = transformers.LlamaConfig(**FOREIGN["Llama"][1], eos_token_id=[3, 5, 7])
    model = drawn(load_hf(config, "causal_lm", kernels=KERNELS))
    made = prune(model, {"layers": 0.3}, importance="l1").model
    assert made.config.num_hidden_layers == 2
    assert made.config.eos_token_id == [3, 5, 7]


_LM = FOREIGN["Llama"][1]
WHOLE = {  # models of transformers with widths that do not follow the number of heads
    "Olmoe": _LM | {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1},  # a norm over all of them
    "Falcon": {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},  # no head_dim
}


@pytest.mark.parametrize("family", WHOLE)
def test_heads_that_other_widths_do_not_follow_stay_whole(family):
    """In words, where the smaller model could not be built or run. Layers can be cut."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**WHOLE[family])
    model = load_hf(config, "causal_lm", kernels=KERNELS)
    model.net.set_experts_implementation("eager")
    drawn(model)
    with pytest.raises(ConfigError) as error:
        prune(model, {"heads": 0.5}, importance="l1")
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)
    assert prune(model, {"layers": 0.5}, importance="l1").after["layers"] < model.config.num_hidden_layers


SPARSE = {
    "every second layer has experts": {"decoder_sparse_step": 2},
    "the first layer has none": {"mlp_only_layers": [0]},
}


@pytest.mark.parametrize("how", SPARSE)
def test_layers_that_are_what_their_number_says_are_not_cut(how):
    """Qwen3-MoE has experts by the number of a layer. One that moves up would be asked for weights that it has not;
    nothing is made then. Other kinds can be cut."""
    import transformers

    values = FOREIGN["Mixtral"][1] | SPARSE[how]
    values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(**values | {"num_hidden_layers": 4})
    model = load_hf(config, "causal_lm", kernels=KERNELS)
    model.net.set_experts_implementation("eager")  # torch's grouped matmul has no FP64
    drawn(model)
    with torch.no_grad():  # the first layer goes
        for name, param in model.named_parameters():
            if ".layers.0." in name:
                param.mul_(1e-3)
    with pytest.raises(LayoutError, match="not interchangeable") as error:
        prune(model, {"layers": 0.25}, importance="l1")
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)
    pruned = prune(model, {"heads": 0.5}, importance="l1")
    assert pruned.after == {"heads": 1}
    assert parameters_left(model, pruned.after) == sum(param.numel() for param in pruned.model.parameters())


def test_units_whose_importance_is_not_known_stay_whole():
    """Experts as one tensor that no linear layer reads: the other kinds are cut, and it is said what would do."""
    import transformers

    values = _LM | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = load_hf(transformers.GraniteMoeConfig(**values), "causal_lm", kernels=KERNELS)
    model.net.set_experts_implementation("eager")  # torch's grouped matmul has no FP64
    drawn(model)
    batches, said = [batch_of(model)], []
    whole = row_losses_of(model, {"text": batches})
    asked = {"batches": batches, "say": said.append, "record": {}, "refit": False}
    found = sensitivities(model, whole, {"text": batches}, ("ffn", "heads"), "activation", **asked)
    assert {cost.kind for cost in found} == {"heads"}
    (line,) = [line for line in said if line.startswith("ffn stay whole")]
    assert "--importance l1" in line
    with pytest.raises(ConfigError, match="Nothing of this model can be cut") as error:
        sensitivities(model, whole, {"text": batches}, ("ffn",), "activation", **asked)
    assert "--importance l1" in error.value.problems[0].got


def test_units_that_are_too_few_for_a_cut_stay_whole():
    """Those of an FFN go in multiples of 32: of 32 none may. The other kinds are cut."""
    import transformers

    model = drawn(load_hf(transformers.LlamaConfig(**_LM | {"intermediate_size": 32}), "causal_lm", kernels=KERNELS))
    batches, said = [batch_of(model)], []
    whole = row_losses_of(model, {"text": batches})
    asked = {"batches": batches, "say": said.append, "record": {}, "refit": False}
    found = sensitivities(model, whole, {"text": batches}, ("ffn", "heads"), "l1", **asked)
    assert {cost.kind for cost in found} == {"heads"}
    assert any(line.startswith("ffn stay whole: 32 of them") for line in said)
    with pytest.raises(ConfigError, match="Nothing of this model can be cut") as error:
        sensitivities(model, whole, {"text": batches}, ("ffn",), "l1", **asked)
    assert error.value.problems[0].try_ == "--cut heads,layers"


@pytest.mark.parametrize("positions", [8, 16, 31])
def test_models_of_few_positions_are_cut_and_timed(positions):
    """Of learned positions there are no more: neither rows that a cut is tried on nor timed ones are longer."""
    import transformers

    config = transformers.GPT2Config(**FOREIGN["GPT2"][1] | {"n_positions": positions})
    model = drawn(load_hf(config, "causal_lm", kernels=KERNELS))
    made = prune(model, {"ffn": 0.5, "layers": 0.5}, importance="l1").model
    assert all(seconds > 0 for seconds in seconds_beside(made, model))
