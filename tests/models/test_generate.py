"""Sampling: greedy, temperature, top-k, end of text, determinism, compiled layers."""

import pytest
import torch

from tests.models.shapes import make_decoder
from tests.models.test_hf_models import make
from tilewright.models.generate import continue_rows, generate
from tilewright.models.sampling import Sampling


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_most_likely_token():
    model = make_decoder("gqa")
    ids = torch.tensor([[5, 6, 7], [1, 2, 3]])
    out = generate(model, ids, 6, temperature=0)
    assert out.shape == (2, 9)
    for end in range(3, 9):
        assert torch.equal(model.eval()(out[:, :end])[:, -1].argmax(-1), out[:, end])


@pytest.mark.parametrize("make_model", [lambda: make_decoder("deepseek"), lambda: make("gpt2")], ids=["own", "hf"])
def test_the_seed_decides(make_model):
    model = make_model()
    ids = torch.tensor([[5, 6, 7]])
    one, two, other = (generate(model, ids, 20, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert model.training, "the mode is returned"


def test_top_k_keeps_to_the_k_most_likely():
    model = make_decoder("gqa")
    ids = torch.zeros(64, 1, dtype=torch.int64)
    allowed = set(model.eval()(ids[:1])[0, -1].topk(3).indices.tolist())
    drawn = generate(model, ids, 1, temperature=2.0, top_k=3, generator=generator())[:, 1].tolist()
    assert set(drawn) == allowed


def test_temperature_follows_the_softmax():
    model = make_decoder("gqa")
    ids = torch.zeros(4000, 1, dtype=torch.int64)
    probs = (model.eval()(ids[:1])[0, -1] / 0.5).softmax(-1)
    drawn = generate(model, ids, 1, temperature=0.5, generator=generator())[:, 1]
    share = torch.bincount(drawn, minlength=61) / 4000
    assert (share - probs).abs().max() < 0.03


def test_rows_end_at_the_end_of_text():
    model = make_decoder("gqa")
    ids = torch.randint(0, 61, (8, 2), generator=generator())
    out = generate(model, ids, 40, temperature=3.0, eos_id=4, generator=generator())
    for row in out[:, 2:].tolist():
        if 4 in row:
            assert set(row[row.index(4) :]) == {4}


def test_compiled_layers_are_not_compiled_again_for_each_length():
    model = make_decoder("gqa")
    want = generate(model, torch.tensor([[3]]), 5, temperature=0)
    torch._dynamo.utils.counters.clear()
    model.compile_blocks()
    assert torch.equal(generate(model, torch.tensor([[3]]), 5, temperature=0), want)
    assert not torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_k": -1}, {"num_tokens": -1}])
def test_impossible_settings(settings):
    with pytest.raises(ValueError, match="negative"):
        generate(make_decoder("gqa"), torch.tensor([[3]]), **{"num_tokens": 2} | settings)


def test_empty_prompt():
    with pytest.raises(ValueError, match="at least one token"):
        generate(make_decoder("gqa"), torch.zeros(1, 0, dtype=torch.int64), 2)


@pytest.mark.parametrize("make_model", [lambda: make_decoder("deepseek"), lambda: make("gpt2")], ids=["own", "hf"])
def test_rows_of_different_lengths_continue_as_each_alone(make_model):
    model = make_model()
    prompts = [torch.arange(1, 1 + length) for length in (9, 7, 7, 2)]
    wanted = 6
    alone = [generate(model, ids[None], wanted, temperature=0)[0, len(ids) :].tolist() for ids in prompts]
    greedy = Sampling(temperature=0)
    assert continue_rows(model, prompts, wanted, sampling=greedy, is_done=lambda row, new: False) == alone
    ends = continue_rows(model, prompts, wanted, sampling=greedy, is_done=lambda row, new: len(new) > row)
    assert ends == [new[: row + 1] for row, new in enumerate(alone)]
