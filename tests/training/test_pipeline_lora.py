"""A run of adapters whose layers are on ranks in a row is the run of one process: losses, checkpoints, exports."""

import json

import pytest
from safetensors.torch import load_file

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import _same, runs
from tests.training.tiny import save_tokenizer

pytestmark = pytest.mark.dist
KEPT = {"lora__rank": 2, "lora__alpha": 4.0, "lora__base": "keep", "optim__lr": 1e-2, "checkpoint__export_hf": "true"}
KEPT |= {"train__steps": 4, "train__eval_interval": 2, "checkpoint__interval": 2}
CODED = KEPT | {"lora__base": "fp8", "precision__mode": "fp8_tile"}
TIED = {"model__tie_embeddings": "true"}
WHOLE = TIED | {"lora__modules_to_save": '["embed_tokens", "lm_head"]'}
SAVED, BOTH = KEPT | WHOLE, CODED | WHOLE
FIRST = KEPT | {"lora__targets": '["*layers.0.*"]'}
"""No adapter on any other rank than the first, which alone has something to train."""
FOREIGN = {"model__kind": "hf", "model__weights": "load"}
LAST = KEPT | FOREIGN | {"lora__targets": '["*layers.3.mlp*"]'}
PIPED = {"parallel__pp": 2}
ZBV = PIPED | {"parallel__schedule": "zbv"}
SHARDS = PIPED | {"parallel__dp_shard": 2}
HALF = {"optim__schedule": "constant", "checkpoint__interval": 0}
ALONE = {"kept": KEPT, "coded": CODED, "saved": SAVED, "both": BOTH, "first": FIRST, "last": LAST}
ALONE["foreign"] = CODED | FOREIGN
SHARED = {"parallel__dp_shard": 2}
"""FP8 weight gradients take one scale for 128 tokens: a run without stages must share its rows in the same way."""
ALONE |= {f"{name} in shards": ALONE[name] | SHARED for name in ("coded", "foreign")}
CASES = [
    # (run without stages, ranks, settings of the stages)
    ("both", 2, ZBV),
]
MORE = [
    ("coded", 2, ZBV),
    ("saved", 2, PIPED),
    ("kept", 2, PIPED),
    ("first", 2, PIPED),
    ("saved", 2, ZBV),
    ("last", 2, PIPED),
    ("last", 2, ZBV),
    ("foreign", 2, PIPED),
    ("coded in shards", 4, PIPED),
    ("saved", 4, SHARDS),
    ("foreign in shards", 4, PIPED),
]


def _launch(data, folder, world, changes):
    """Runs on so many ranks; by name what each rank returned."""
    path = {"model__path": str(folder / "model")}
    given = {name: run | (path if "model__kind" in run else {}) for name, run in changes.items()}
    found = on_ranks(world, runs, str(data), str(folder), given)
    return {name: [of_rank[name] for of_rank in found] for name in changes}


def _save_model(folder):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(folder / "model")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def _check(data, folder, cases):
    if any("model__kind" in ALONE[name] for name, _, _ in cases):
        _save_model(folder)
    for world in (1, 2):
        without = {name: ALONE[name] for name, _, _ in cases if ALONE[name].get("parallel__dp_shard", 1) == world}
        if without:
            _launch(data, folder, world, without)
    for world in sorted({world for _, world, _ in cases}):
        piped = {
            f"{name}{number}": ALONE[name] | more
            for number, (name, ranks, more) in enumerate(cases)
            if ranks == world
        }  # fmt: skip
        for name, found in _launch(data, folder, world, piped).items():
            assert not any(isinstance(of_rank, str) for of_rank in found), found[0]
            alone = name.rstrip("0123456789")
            _same(folder / name, folder / alone)
            ours, theirs = (load_file(folder / run / "hf/adapter_model.safetensors") for run in (name, alone))
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert (ours[key] - tensor).abs().max() < 1e-4, f"{name}: {key}"
            configs = [json.loads((folder / run / "hf/adapter_config.json").read_text()) for run in (name, alone)]
            assert configs[0] == configs[1]


@pytest.mark.support("lora", "stages")
@pytest.mark.timeout(600)
def test_it_is_the_run_of_one_process(data, tmp_path):
    _check(data, tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_of_them(data, tmp_path):
    _check(data, tmp_path, MORE)


@pytest.mark.slow
def test_one_process_goes_on_in_stages(data, tmp_path):
    run = SAVED | HALF
    _launch(data, tmp_path, 1, {"goes_on": run | {"train__steps": 2}, "whole": run})
    assert _launch(data, tmp_path, 2, {"goes_on": run | ZBV})["goes_on"][0][0] == 4
    _same(tmp_path / "goes_on", tmp_path / "whole")
