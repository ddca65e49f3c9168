"""A run of a Hugging Face model in stages is the run of one process: losses, evaluations, samples, export."""

import pytest

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import HALF, _same, rows_of_export, runs
from tests.training.tiny import rows, save_tokenizer

pytestmark = pytest.mark.dist
RUN = {"model__kind": "hf", "model__weights": "load", "checkpoint__export_hf": "true"}
STAGES = {"parallel__pp": 2}
CUT = STAGES | {"parallel__tp": 2, "ops__cross_entropy": "native"}
STOP = {"train__steps": 3, "train__sample_tokens": 0}


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    """Runs on so many ranks: the folder of all, and by name and rank what each returned."""
    transformers = pytest.importorskip("transformers")
    folder, found = tmp_path_factory.mktemp("foreign"), {}
    save_tokenizer(folder / "model")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1
    )
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")

    def of(world, changes):
        given = {name: RUN | {"model__path": str(folder / "model")} | run for name, run in changes.items()}
        for rank, of_rank in enumerate(on_ranks(world, runs, str(data), str(folder), given)):
            found.update({(name, rank): value for name, value in of_rank.items()})
        return folder, found

    return of


@pytest.fixture(scope="module")
def ran(launch):
    """One process begins, and stages whose matrices are cut continue: tied ends are one parameter of two ranks, which
    both read, and which is saved once."""
    launch(1, {"alone": HALF, "cut": HALF | STOP})
    return launch(4, {"cut": HALF | CUT, "few": CUT | {"parallel__schedule": "zbv"}})


@pytest.mark.support("hf", "stages")
def test_it_is_the_run_of_one_process(ran):
    check(*ran, "cut", 4)


def check(folder, found, name, world):
    for rank in range(world):
        assert not isinstance(found[name, rank], str), found[name, rank]
        assert found[name, rank] == found[name, 0], "all ranks have the last stage's numbers"
    assert found[name, 0][0] == 6
    _same(folder / name, folder / "alone")
    assert found[name, 0][2] == pytest.approx(found["alone", 0][2], rel=2e-6)
    ours, theirs = (rows(folder / run / "samples.jsonl") for run in (name, "alone"))
    ours, theirs = ([(row["prompt"], row["text"]) for row in found] for found in (ours, theirs))
    assert ours
    assert ours == theirs[-len(ours) :], "a run from its beginning has those of before the first step, too"


@pytest.mark.slow
def test_other_ways_on(ran, launch):
    """Stages alone, and to one process."""
    launch(1, {"alone_first": HALF | STOP})
    launch(2, {"stages": HALF | STAGES, "piped_first": STAGES | HALF | STOP, "alone_first": HALF | STAGES})
    launch(4, {"cut_first": HALF | STOP | CUT})
    folder, found = launch(1, {"piped_first": HALF, "cut_first": HALF})
    check(folder, found, "stages", 2)
    check_folder(folder, "stages")
    for name in ("alone_first", "piped_first", "cut_first"):
        assert found[name, 0][0] == 6, found[name, 0]
        _same(folder / name, folder / "alone")


def test_its_folder_is_that_of_one_process(ran):
    check_folder(ran[0], "cut")


def check_folder(folder, run):
    ours, theirs = (rows_of_export(folder / one / "hf") for one in (run, "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


def test_too_few_layers_are_told_on_all_ranks(ran):
    for rank in range(4):
        assert "Fewer layers than stages of the pipeline" in ran[1]["few", rank]
