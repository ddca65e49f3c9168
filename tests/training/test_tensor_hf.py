"""A run of a Hugging Face model whose matrices are cut over ranks is the run of one process: losses, evaluations,
samples, checkpoints of other cuts, export. By default a run of
`test_pipeline_hf` has stages that are cut."""

import pytest
from safetensors.torch import load_file

from tests.ranks import on_ranks
from tests.training.test_experts_run import ALONE, PAIRS, Launches, check_same, write_pairs
from tests.training.test_pipeline_run import EXPORT
from tests.training.test_sharded_plan import OWNERS, UNCOMPILED, WITHIN, held
from tests.training.tiny import save_tokenizer

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"initializer_range": 0.1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
RUN = ALONE | {
    "ops__cross_entropy": "native", "train__steps": 3, "train__eval_interval": 1, "checkpoint__interval": 1,
}  # fmt: skip
CUT = {"parallel__tp": 2}
LORA = {"lora__rank": 2, "lora__base": "keep", "optim__lr": 1e-2, "optim__master_weights": "stochastic"}
"""On a base in BF16, as `finetune` has it."""


def write_model(folder, family, **more):
    """Weights and tokenizer of a tiny one, and what a recipe says of it."""
    import transformers as hf

    latent = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    routed |= {"n_group": 2, "topk_group": 1, "initializer_range": 0.1}
    chosen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
    config = {
        "llama": lambda: hf.LlamaConfig(**SIZES | HEADS | more),
        "qwen3": lambda: hf.Qwen3Config(**SIZES | HEADS | {"tie_word_embeddings": True} | more),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES | HEADS | chosen | more),
        "deepseek_v3": lambda: hf.DeepseekV3Config(
            **SIZES | latent | routed | {"num_attention_heads": 4, "num_key_value_heads": 4} | more,
            moe_intermediate_size=16,
        ),
    }[family]()
    hf.set_seed(0)
    save_tokenizer(folder / family)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return {"model__kind": "hf", "model__weights": "load", "model__path": str(folder / family)}


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """One goes from a cut to one process and back to a cut."""
    folder = tmp_path_factory.mktemp("foreign")
    launch = Launches(data, folder, RUN | write_model(folder, "qwen3"))
    launch(1, {"alone": EXPORT}, seconds=240)
    launch(2, {"two": CUT | EXPORT, "moved": CUT | {"train__steps": 1}}, seconds=240)
    launch(1, {"moved": {"train__steps": 2}}, seconds=240)
    launch(2, {"moved": CUT}, seconds=240)
    return launch


@pytest.mark.support("hf", "tensor")
def test_it_is_the_run_of_one_process(ran):
    ran.check("two", 2, "alone")


def test_it_goes_on_as_one_process_and_cut_again(ran):
    assert (ran.found["moved", 1, 0][0], ran.found["moved", 2, 0][0]) == (2, 3)
    check_same(ran.folder / "moved", ran.folder / "alone")


def check_folders(ran, name, other):
    ours, theirs = (load_file(ran.folder / one / "hf" / "model.safetensors") for one in (name, other))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


def test_its_folder_is_that_of_one_process(ran):
    check_folders(ran, "two", "alone")


PLANNED = {
    "llama": {"optim__moments": "bf16"}, "qwen3_moe": {"parallel__ep": 2}, "deepseek_v3": {},
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.support("plan", "tensor")
def test_bytes_of_each_rank_are_those_of_the_plan(data, tmp_path):
    """Of parts of matrices, and of experts that are sharded apart."""
    one_row = UNCOMPILED | CUT | {"ops__cross_entropy": "native", "train__micro_batch_size": 4}
    cases = {family: write_model(tmp_path, family) | one_row | more for family, more in PLANNED.items()}
    for rank, found in enumerate(on_ranks(2, held, str(data), str(tmp_path), cases, seconds=550)):
        for name, (_, shares, measured) in found.items():
            (share,) = [row for row in shares if 0 in row["ranks"]]  # both ranks are of the first data rank
            for owner in OWNERS:
                assert measured["update"][owner] == pytest.approx(share[owner], rel=WITHIN), f"{name}: {owner}, {rank}"


FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")
MOVED = {"precision__mode": "fp8_tile", "precision__fp8_until": 0.5}


@pytest.mark.timeout(900)
def test_families_and_formats_that_move(data, tmp_path):
    """Of random weights too, of shards of parts, and of experts that are spread over both."""
    launch = Launches(data, tmp_path, RUN)
    models = {family: write_model(tmp_path, family) for family in FAMILIES}
    random = {"moved": models["llama"] | MOVED, "random": models["llama"] | {"model__weights": "random"}}
    launch(1, {f"{name}_alone": of_run | EXPORT for name, of_run in (models | random).items()}, seconds=400)
    launch(2, {name: of_run | CUT for name, of_run in random.items()}, seconds=400)
    experts = {name: CUT | {"parallel__dp_shard": 2, "parallel__ep": 2} for name in ("qwen3_moe", "deepseek_v3")}
    launch(4, {name: of_run | CUT | EXPORT | experts.get(name, {}) for name, of_run in models.items()}, seconds=400)
    for key, value in launch.found.items():
        assert not isinstance(value, str), f"{key}: {value}"
    for name in FAMILIES:
        launch.check(name, 4, f"{name}_alone")
        check_folders(launch, name, f"{name}_alone")
    launch.check("random", 2, "random_alone")
    check_same(tmp_path / "moved", tmp_path / "moved_alone", bound=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_go_on_with_other_cuts_and_are_exported_whole(data, tmp_path):
    """B is zero at first, and Adam's first step of an element is the rate, this way or that, however small its gradient
    is: some last bits are a step of B, and of the gradient of A, which is as large as B."""
    launch = Launches(data, tmp_path, RUN | write_model(tmp_path, "qwen3") | LORA | EXPORT)
    launch(1, {"alone": {}}, seconds=240)
    launch(2, {"cut": CUT | {"train__steps": 1}}, seconds=240)
    launch(1, {"cut": {"train__steps": 2}}, seconds=240)
    launch(2, {"cut": CUT}, seconds=240)
    for key, value in launch.found.items():
        assert not isinstance(value, str), f"{key}: {value}"
    assert [launch.found["cut", world, 0][0] for world in (1, 2)] == [2, 3]
    check_same(tmp_path / "cut", tmp_path / "alone", bound=1e-3)
    ours, theirs = (load_file(tmp_path / name / "hf/adapter_model.safetensors") for name in ("cut", "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert tensor.shape == ours[key].shape
        assert (ours[key] - tensor).norm() < 2e-2 * tensor.norm(), key


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["hf", "decoder"])
def test_preferences_are_learned_as_on_one_process(data, tmp_path, kind):
    write_pairs(tmp_path / "pairs.jsonl")
    more = PAIRS | {"data__source": str(tmp_path / "pairs.jsonl")} | write_model(tmp_path, "llama")
    launch = Launches(data, tmp_path, RUN | more | {"model__kind": kind})
    launch(1, {"alone": {}}, seconds=240)
    launch(2, {"two": CUT}, seconds=240)
    for key, value in launch.found.items():
        assert not isinstance(value, str), f"{key}: {value}"
    assert launch.found["two", 2, 0] == launch.found["two", 2, 1]
    check_same(tmp_path / "two", tmp_path / "alone", bound=1e-5)
