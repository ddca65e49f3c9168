"""A run whose matrices are cut over ranks is the run of one process: losses, evaluations, samples, checkpoints."""

import pytest
from safetensors.torch import load_file

from tests.training.test_experts_run import ALONE, FULL, MIXED, SPREAD, STOP, Launches, check_same
from tests.training.test_pipeline_run import EXPORT
from tests.training.tiny import rows

pytestmark = pytest.mark.dist
DENSE = ALONE | {
    "model__num_layers": 2, "model__num_heads": 4, "model__num_kv_heads": 4, "model__ffn_dim": 64,
    "ops__cross_entropy": "native", "data__vocab_size": 300,
}  # fmt: skip
LATENT = {
    "model__attention": "mla", "model__kv_lora_rank": 16, "model__qk_nope_head_dim": 8, "model__qk_rope_head_dim": 8,
    "model__v_head_dim": 8, "model__tie_embeddings": "true",
}  # fmt: skip
MUON = {"optim__kind": "muon", "train__steps": 3}
CUT, FOUR = {"parallel__tp": 2}, {"parallel__tp": 4}


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """A run with latent attention, dense and expert layers, that goes on with twice as many ranks."""
    launch = Launches(data, tmp_path_factory.mktemp("cut"), DENSE)
    mixed = MIXED | {"model__num_heads": 4, "model__num_kv_heads": 4}
    launch(1, {"mixed_alone": EXPORT | mixed})
    launch(2, {"mixed": CUT | mixed | STOP | {"train__sample_tokens": 0}})
    launch(4, {"mixed": CUT | SPREAD | EXPORT | mixed})
    return launch


@pytest.fixture(scope="module")
def more(data, tmp_path_factory):
    """Some runs stop half-way, and go on elsewhere: from and to one process, other cuts, shards of cuts. By default
    `test_cut_stages_run` has a dense decoder that goes on as one process."""
    launch = Launches(data, tmp_path_factory.mktemp("more"), DENSE)
    launch(1, {"alone": EXPORT, "latent_alone": LATENT, "muon_alone": MUON, "from_one": STOP})
    launch(2, {"two": CUT | EXPORT, "from_one": CUT, "to_one": CUT | STOP, "shards": STOP, "from_two": CUT | STOP,
               "latent": CUT | LATENT, "muon": CUT | MUON}, seconds=240)  # fmt: skip
    launch(1, {"to_one": {}})
    launch(4, {"from_two": CUT | FULL, "both": CUT | EXPORT, "shards": FOUR})
    return launch


@pytest.mark.support("run", "tensor")
@pytest.mark.support("decoder", "tensor")
@pytest.mark.support("evaluation", "tensor")
@pytest.mark.support("accumulation", "tensor")
def test_it_is_the_run_of_one_process(ran):
    ran.check("mixed", 4, "mixed_alone")


@pytest.mark.support("resume", "tensor")
@pytest.mark.support("reshard", "tensor")
def test_it_goes_on_with_other_ranks(ran):
    assert [ran.found["mixed", world, 0][0] for world in (2, 4)] == [2, 4]


@pytest.mark.slow
def test_a_dense_decoder_is_that_of_one_process(more):
    more.check("two", 2, "alone")
    check_folder(more, "two", "alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["from_one", "to_one", "shards", "from_two"])
def test_it_goes_on_with_other_ranks_and_as_one_process(more, name):
    ends = {key: value for key, value in more.found.items() if key[0] == name}
    assert {value if isinstance(value, str) else value[0] for value in ends.values()} <= {2, 4}
    assert any(value[0] == 4 for value in ends.values())
    check_same(more.folder / name, more.folder / "alone")


@pytest.mark.slow
def test_shards_of_what_is_cut(more):
    more.check("both", 4, "alone")
    check_folder(more, "both", "alone")


@pytest.mark.slow
def test_latent_attention_is_that_of_one_process(more):
    more.check("latent", 2, "latent_alone")


@pytest.mark.support("export", "tensor")
def test_its_folder_is_that_of_one_process(ran):
    check_folder(ran, "mixed", "mixed_alone")


def check_folder(launch, name, other):
    ours, theirs = (load_file(launch.folder / one / "hf" / "model.safetensors") for one in (name, other))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


@pytest.mark.slow
@pytest.mark.support("muon", "tensor")
def test_muon_has_the_directions_of_whole_matrices(more):
    """Sums of gradients differ in the last bit, which Newton-Schulz in BF16 rounds to others."""
    assert not isinstance(more.found["muon", 2, 0], str), more.found["muon", 2, 0]
    check_same(more.folder / "muon", more.folder / "muon_alone", bound=1e-3)


def test_parameters_are_told_of_all_ranks(ran):
    starts = [
        next(row for row in rows(ran.folder / name / "events.jsonl") if row["kind"] == "start")
        for name in ("mixed", "mixed_alone")
    ]
    assert starts[0]["parameters"] == starts[1]["parameters"]


WIDE = {"model__dim": 128, "model__num_heads": 4, "model__head_dim": 64, "model__ffn_dim": 256}
"""Parts of two ranks hold whole blocks of 128 columns."""
KINDS = {
    "bits": WIDE | {"optim__moments": "8bit"},
    "bf16_moments": {"optim__moments": "bf16"},
    "bf16": {"precision__mode": "bf16_mixed"},
    "fp8": WIDE | {"precision__mode": "fp8_tile"},
    "tiled": {"memory__mlp_chunks": 2},
    "documents": {"data__rows": "documents"},
    "clipped": {"optim__clip_norm": 0.01, "optim__clip_adaptive": 0.5, "optim__clip_elements": 0.001},
    "odd": {"data__vocab_size": 301, "model__tie_embeddings": "false"},
}
BOUNDS = {"bits": 1e-3, "bf16_moments": 1e-3, "bf16": 1e-2, "fp8": 1e-2}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.support("adam", "tensor")
@pytest.mark.support("clip", "tensor")
@pytest.mark.support("tiled", "tensor")
def test_kinds_of_runs(data, tmp_path):
    """Where the order of a sum decides what a number is rounded to, two steps on are others too."""
    launch = Launches(data, tmp_path, DENSE)
    launch(1, {f"{kind}_alone": of_kind for kind, of_kind in KINDS.items()}, seconds=180)
    launch(2, {kind: of_kind | CUT for kind, of_kind in KINDS.items()}, seconds=180)
    for kind in KINDS:
        for rank in range(2):
            assert not isinstance(launch.found[kind, 2, rank], str), launch.found[kind, 2, rank]
        assert launch.found[kind, 2, 0] == launch.found[kind, 2, 1]
        check_same(tmp_path / kind, tmp_path / f"{kind}_alone", bound=BOUNDS.get(kind, 2e-6))


STORED = {
    "stochastic": {"optim__master_weights": "stochastic", "precision__mode": "bf16_mixed"},
    "split24": WIDE | {"optim__master_weights": "split24", "optim__moments": "8bit", "precision__mode": "bf16_mixed"},
    "fp16": {"precision__mode": "pure_fp16"},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_in_16_bits(data, tmp_path):
    """Rounded by chance or with their low halves beside them; the bits of a chance are an element's, wherever it is."""
    launch = Launches(data, tmp_path, DENSE)
    launch(1, {f"{kind}_alone": of_kind for kind, of_kind in STORED.items()}, seconds=180)
    launch(2, {kind: of_kind | CUT | STOP for kind, of_kind in STORED.items()}, seconds=180)
    launch(4, {kind: of_kind | CUT for kind, of_kind in STORED.items()}, seconds=180)  # in shards of the parts
    for kind in STORED:
        for rank in range(4):
            assert not isinstance(launch.found[kind, 4, rank], str), launch.found[kind, 4, rank]
        check_same(tmp_path / kind, tmp_path / f"{kind}_alone", bound=1e-2)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_and_what_is_refused(data, tmp_path):
    launch = Launches(data, tmp_path, DENSE)
    launch(2, {"nan": CUT | {"optim__lr": "1e30"}, "blocks": CUT | {"optim__moments": "8bit"}})
    launch(4, {"nan4": CUT | {"optim__lr": "1e30"}, "uneven": CUT | {"model__ffn_dim": 66}})
    for rank in range(2):
        assert "Non-finite gradient in 3 steps in a row" in launch.found["nan", 2, rank]
        assert "multiple of 256 columns" in launch.found["blocks", 2, rank]
    for rank in range(4):
        assert "Non-finite gradient in 3 steps in a row" in launch.found["nan4", 4, rank]
        assert "rows that divide by tp x dp_shard = 4" in launch.found["uneven", 4, rank]


@pytest.mark.slow
def test_copies_are_the_run_of_one_process(data, tmp_path):
    launch = Launches(data, tmp_path, DENSE)
    launch(1, {"alone": {}})
    launch(4, {"copies": CUT | {"parallel__dp_replicate": 2}})
    launch.check("copies", 4, "alone")
