"""A model of another project compressed: its folder is opened with a recipe of recovery, cut, taught by itself, and
what comes out is a folder that transformers reads."""

import json

import pytest
import torch

from tests.training.tiny import save_tokenizer, write_text
from tilewright.cli.app import run as cli
from tilewright.cli.load_run import open_to_compress
from tilewright.core.errors import ConfigError

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {"Llama": {}, "Qwen3": {"head_dim": 16, "tie_word_embeddings": True}, "Mistral": {"sliding_window": None}}


def foreign_folder(family, folder, seed=0):
    """A model as its project publishes it, with a tokenizer."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family])
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def settings(text, runs):
    values = {
        "data.source": text, "data.cache_dir": runs / "cache", "data.seq_len": 32, "data.holdout": 0.2,
        "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.compile": "off", "train.eval_batches": 1,
        "precision.mode": "fp32", "ops.cross_entropy": "ref", "ops.adam": "ref", "run.threads": 1,
        "energy.idle_seconds": 0,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_opened_as_it_computes(family, text, tmp_path):
    """Logits of what is opened are those of transformers; the recipe has the settings that were typed."""
    import transformers

    folder = foreign_folder(family, tmp_path / "model")
    source = open_to_compress(str(folder), settings(text, tmp_path))
    assert source.recipe.data.seq_len == 32
    assert source.recipe.model.weights == "load"
    ids = torch.randint(300, (2, 16))
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, found = net(ids).logits[:, -1], source.model.next_token_logits(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_folder_is_measured_and_cut_plans_are_shown(text, tmp_path, capsys):
    folder, out = foreign_folder("Llama", tmp_path / "model"), tmp_path / "out"
    options = ["--budget", "20%", "--cut", "heads", "--targets", "hf", "--out", str(out), "--dry-run"]
    assert cli(["compress", str(folder), *options, *settings(text, tmp_path)]) == 0
    assert "heads-1" in capsys.readouterr().out
    record = json.loads((out / "compress.json").read_text())
    assert record["run"] == "model"
    foreign_folder("Llama", folder, seed=1)
    assert cli(["compress", str(folder), *options, *settings(text, tmp_path)]) == 2
    assert "another weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "typed", "match"),
    [
        ("nothing-here", [], "No such run and no such model"),
        ("nothing-here", ["--model.dim=64"], "another model"),
        ("nothing-here", ["--lora.rank", "8"], "another model"),
        ("nothing-here", ["--data.tokenizer", "tokenizer.json"], "another model"),
    ],
)
def test_bad_names_and_settings(name, typed, match):
    with pytest.raises(ConfigError, match=match) as error:
        open_to_compress(name, typed)
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)


@pytest.mark.slow
@pytest.mark.timeout(900)  # consumers in processes of their own
@pytest.mark.parametrize(("family", "targets"), [("Llama", "hf,fp8,edge4"), ("Qwen3", "hf"), ("Mistral", "hf")])
def test_a_folder_is_compressed_and_reloads(family, targets, text, tmp_path, monkeypatch):
    """The whole command; its artefacts are proven, and transformers reads the smaller model without code of ours."""
    import transformers

    monkeypatch.setattr("tilewright.compress.export_run.BASELINES", ())
    folder, out = foreign_folder(family, tmp_path / "model"), tmp_path / "out"
    options = ["--budget", "50%", "--targets", targets, "--steps", "3", "--tries", "1", "--controls", "equal"]
    assert cli(["compress", str(folder), *options, "--out", str(out), *settings(text, tmp_path)]) == 0
    record = json.loads((out / "compress.json").read_text())
    assert record["verdict"] == "inside budget"
    assert {row["state"] for row in record["artefacts"]} == {"ran"}
    assert list((out / "teacher").glob("*.rows"))
    best = record["recovered"][record["chosen"]]
    made = next(path for path in (out / "artefacts").iterdir() if (path / "config.json").is_file())
    net, info = transformers.AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(info.values()), info
    assert sum(param.numel() for param in net.parameters()) == best["parameters"] < record["parameters"]
    transformers.AutoTokenizer.from_pretrained(made)
    assert net.config.num_key_value_heads == best["units"]["heads"][1]
