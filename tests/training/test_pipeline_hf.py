"""A run of a Hugging Face model in stages is the run of one process: losses, evaluations, samples, export."""

import pytest

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import HALF, _same, rows_of_export, runs
from tests.training.tiny import rows, save_tokenizer

pytestmark = pytest.mark.dist
RUN = {"model__kind": "hf", "model__weights": "load", "checkpoint__export_hf": "true"}
STAGES = {"parallel__pp": 2}
CUT = STAGES | {"parallel__tp": 2, "ops__cross_entropy": "native"}


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder, found = tmp_path_factory.mktemp("foreign"), {}
    save_tokenizer(folder / "model")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1
    )
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    run = RUN | {"model__path": str(folder / "model")}
    refused = run | STAGES | {"parallel__schedule": "zbv"}
    whole = RUN | HALF | {"model__path": str(folder / "model"), "checkpoint__export_hf": "false"}
    stop = whole | {"train__steps": 3}
    launches = (
        (1, {"alone": run, "whole": whole, "alone_first": stop}),
        (2, {"stages": run | STAGES, "few": refused, "piped_first": stop | STAGES, "alone_first": whole | STAGES}),
        (4, {"cut": run | CUT, "cut_first": stop | CUT}),
        (1, {"piped_first": whole, "cut_first": whole}),
    )
    for world, changes in launches:
        for rank, of_rank in enumerate(on_ranks(world, runs, str(data), str(folder), changes)):
            found |= {(name, rank): value for name, value in of_rank.items()}
    return folder, found


@pytest.mark.support("hf", "stages")
@pytest.mark.parametrize(("name", "world"), [("stages", 2), ("cut", 4)])
def test_it_is_the_run_of_one_process(ran, name, world):
    folder, found = ran
    for rank in range(world):
        assert not isinstance(found[name, rank], str), found[name, rank]
        assert found[name, rank] == found[name, 0], "all ranks have the last stage's numbers"
    _same(folder / name, folder / "alone")
    assert found[name, 0][2] == pytest.approx(found["alone", 0][2], rel=2e-6)
    ours, theirs = (rows(folder / run / "samples.jsonl") for run in (name, "alone"))
    assert [(row["prompt"], row["text"]) for row in ours] == [(row["prompt"], row["text"]) for row in theirs]


@pytest.mark.parametrize("name", ["alone_first", "piped_first", "cut_first"])
def test_tied_ends_go_on_in_stages_and_on_one_process(ran, name):
    """One parameter of two ranks is saved once, and read by both."""
    folder, found = ran
    assert found[name, 0][0] == 6, found[name, 0]
    _same(folder / name, folder / "whole")


@pytest.mark.parametrize("name", ["stages", "cut"])
def test_its_folder_is_that_of_one_process(ran, name):
    ours, theirs = (rows_of_export(ran[0] / run / "hf") for run in (name, "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


def test_too_few_layers_are_told_on_all_ranks(ran):
    for rank in range(2):
        assert "Fewer layers than stages of the pipeline" in ran[1]["few", rank]
