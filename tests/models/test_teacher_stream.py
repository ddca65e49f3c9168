"""A teacher's rows are kept by the stream that they are of: each setting that changes rows or their order names
another, and what does not change them names the same."""

import pytest

from tests.planner.rates import make_recipe
from tilewright.models.teacher_folder import stream_of

OTHERS = {
    "the teacher": {"distill": {"teacher": "b"}},
    "the model whose tokenizer is taken": {"model": {"path": "other"}},
    "a tokenizer": {"data": {"tokenizer": "its"}},
    "the seed": {"run": {"seed": 1}},
    "rows per step": {"train": {"global_batch_size": 4}},
    "tokens per row": {"data": {"seq_len": 64}},
    "the text": {"data": {"source": "there"}},
    "what is held out": {"data": {"holdout": 0.3}},
}
SAME = {
    "the cache folder": {"data": {"cache_dir": "there"}},
    "rows at once": {"train": {"micro_batch_size": 1}},
    "the rate": {"optim": {"lr": 1e-5}},
}


def stream(**sections):
    base = {"distill": {"teacher": "a"}, "model": {"path": "here", "weights": "load"}}
    return stream_of(make_recipe(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}))


@pytest.mark.parametrize("sections", OTHERS.values(), ids=OTHERS)
def test_another_stream(sections):
    assert stream() != stream(**sections)


@pytest.mark.parametrize("sections", SAME.values(), ids=SAME)
def test_the_same_stream(sections):
    assert stream() == stream(**sections)


def test_a_tokenizer_of_its_own_goes_before_the_models():
    data = {"tokenizer": "its"}
    assert stream(data=data) == stream(data=data, model={"path": "other"})


def test_rows_that_depend_on_the_run_are_of_no_stream():
    assert not stream(data={"mixing": {"policy": "exp3"}})
