"""Loaded weights learn from the ids that they know: the folder's tokenizer prepares the data, or nothing does."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig

from tests.training.tiny import WORDS, settings, tiny
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer
from tilewright.data.prepare import prepare
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.training.components.recipe_data import prepare_data

ROOT = Path(__file__).resolve().parents[2]
LOAD = {"model__weights": "load"}


def decoder_folder(folder, dtype=torch.float32):
    """A folder of our decoder's, in the Llama layout, without a tokenizer."""
    model = Decoder(DecoderConfig.of(vocab_size=320, dim=32, num_layers=2, num_heads=2, tie_embeddings=False))
    init_weights(model, 5)
    model.save_hf(folder, dtype=dtype)
    return folder


@pytest.fixture
def folder(tmp_path):
    return decoder_folder(tmp_path / "model")


@pytest.fixture
def own():
    """A tokenizer that no run would train on the tiny text: its ids are in another order."""
    return train_tokenizer([" ".join(reversed(WORDS)) * 30, "another text with other merges " * 20], 310)


def prepared(data, tmp_path, **changes):
    cache = tmp_path / "cache"
    return prepare_data(tiny(data, tmp_path, data__cache_dir=cache, **changes).recipe)


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_the_folders_tokenizer_prepares_the_data(kind, folder, own, data, tmp_path):
    own.save(folder)
    found = prepared(data, tmp_path, model__path=folder, model__kind=kind, **LOAD)
    assert found.tokenizer.backend.to_str() == own.backend.to_str()
    row = next(iter(found.eval_batches("alpha", 1, 1)))["input_ids"][0]
    assert own.decode(row.tolist()) == found.tokenizer.decode(row.tolist())
    other = prepared(data, tmp_path, model__path=folder, model__kind=kind)  # random weights learn any ids
    assert other.tokenizer.backend.to_str() != own.backend.to_str()


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_a_folder_without_a_tokenizer_is_refused_before_data_is_prepared(kind, folder, data, tmp_path):
    with pytest.raises(ConfigError, match="No usable tokenizer in the folder of the loaded weights") as error:
        prepared(data, tmp_path, model__path=folder, model__kind=kind, **LOAD)
    problem = error.value.problems[0]
    assert problem.got
    assert problem.need
    assert "data.tokenizer" in problem.try_
    assert 'model.weights = "random"' in problem.try_
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "file", ["tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json"]
)
def test_another_tokenizer_file_names_its_conversion(file, folder, data, tmp_path):
    (folder / file).write_text("{}")
    with pytest.raises(ConfigError, match="No usable tokenizer in the folder of the loaded weights") as error:
        prepared(data, tmp_path, model__path=folder, **LOAD)
    assert file in error.value.problems[0].got
    assert f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')" in error.value.problems[0].try_
    assert not (tmp_path / "cache").exists()


def test_a_given_tokenizer_is_used_instead(folder, own, data, tmp_path):
    own.save(tmp_path / "mine")
    found = prepared(data, tmp_path, model__path=folder, data__tokenizer=tmp_path / "mine", **LOAD)
    assert found.tokenizer.backend.to_str() == own.backend.to_str()


@pytest.mark.parametrize("kind", ["decoder", "hf"])
@pytest.mark.parametrize("where", ["model", "mine"])
def test_an_id_beyond_the_embedding_is_refused_before_data_is_prepared(kind, where, folder, own, data, tmp_path):
    # 310 entries, but the largest id is 320, one beyond the last of 320 embeddings.
    backend = json.loads(own.backend.to_str())
    backend["added_tokens"][3]["id"] = 320
    backend["model"]["vocab"]["<|mask|>"] = 320
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "tokenizer.json").write_text(json.dumps(backend))
    given = {} if where == "model" else {"data__tokenizer": tmp_path / where}
    with pytest.raises(ConfigError, match="more tokens than the model"):
        prepared(data, tmp_path, model__path=folder, model__kind=kind, **LOAD, **given)
    assert not (tmp_path / "cache").exists()


def words(folder):
    """A tokenizer none of whose tokens has a name that is known; ids 5 and 6 are to begin and end documents."""
    names = [*WORDS[:5], "<|open|>", "<|close|>", *WORDS[5:], "[unk]"]
    backend = Backend(WordLevel({name: i for i, name in enumerate(names)}, unk_token="[unk]"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))


def prepared_here(data, tmp_path, folder):
    """Rows made in this process, which takes a tenth of a second."""
    cache = str(tmp_path / "cache")
    return prepare(str(data / "text"), tokenizer=str(folder), holdout=0.2, seq_len=32, cache_dir=cache)


ENDS = {"bos_token": "<|open|>", "eos_token": "<|close|>"}
SOURCES = {
    "tokenizer_config.json": ENDS,
    "special_tokens_map.json": {name: {"content": token} for name, token in ENDS.items()},
    "generation_config.json": {"bos_token_id": 5, "eos_token_id": [6, 3]},
    "config.json": {"bos_token_id": 5, "eos_token_id": 6},
}


@pytest.mark.parametrize("file", SOURCES)
def test_documents_begin_and_end_as_the_folder_says(file, folder, data, tmp_path):
    words(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | SOURCES[file]))
    found = prepared_here(data, tmp_path, folder)
    assert (found.tokenizer.bos_id, found.tokenizer.eos_id) == (5, 6)
    batch = found.eval_batches("alpha", 1, 1)[0]
    begins = (batch["positions"][0] == 0) & (batch["segments"][0] >= 0)
    assert 5 in batch["input_ids"][0][begins]
    assert {5, 6} <= set(np.load(found._corpus / "train.npy").tolist())


def test_ends_that_no_file_names_are_an_error(folder, data, tmp_path):
    words(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "s_token_id" not in k}))
    with pytest.raises(DataError, match="Tokenizer without an end-of-document token"):
        prepared_here(data, tmp_path, folder)


@pytest.mark.parametrize("file", ["tokenizer.json", *SOURCES])
def test_prepared_data_is_of_the_tokenizers_content(file, folder, data, tmp_path):
    words(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    first = prepared_here(data, tmp_path, folder)
    if file == "tokenizer.json":
        backend = json.loads((folder / file).read_text())
        vocab = backend["model"]["vocab"]
        vocab[WORDS[0]], vocab[WORDS[1]] = vocab[WORDS[1]], vocab[WORDS[0]]
        (folder / file).write_text(json.dumps(backend))
    else:
        before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        if file == "config.json":  # what generation_config.json says comes first
            (folder / "generation_config.json").unlink()
        changed = {"eos_token": WORDS[0]} if "token" in file else {"eos_token_id": 3}
        (folder / file).write_text(json.dumps(before | changed))
    second = prepared_here(data, tmp_path, folder)
    assert first.fingerprint != second.fingerprint
    assert prepared_here(data, tmp_path, folder).folder == second.folder


def blocks(page, kind):
    """The code blocks of one kind on a page of the docs."""
    text = (ROOT / "docs" / page).read_text()
    return [part.split("```")[0] for part in text.split(f"```{kind}\n")[1:]]


def test_recipes_of_the_docs_use_the_tokenizer_of_their_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("how-to/fp8-checkpoints.md", "python")[0], "how-to/fp8-checkpoints.md", "exec"), {})
    recipes = [text for text in blocks("how-to/fp8-checkpoints.md", "toml") if 'weights = "load"' in text]
    assert len(recipes) == 2
    changes = settings(data, tmp_path)
    changes = {name: changes[name] for name in changes if name.startswith("data.") and name != "data.vocab_size"}
    for number, text in enumerate(recipes):
        (tmp_path / f"{number}.toml").write_text(text)
        loaded = load_recipe(tmp_path / f"{number}.toml", changes, environ={})
        found = prepare_data(loaded.recipe)
        assert loaded.recipe.data.tokenizer == ""
        assert found.tokenizer.backend.to_str() == load_tokenizer("published").backend.to_str()


@pytest.mark.parametrize("weights", ["random", "load"])
def test_rows_beyond_the_positions_are_refused_before_data_is_prepared(weights, own, data, tmp_path):
    sizes = {"vocab_size": 320, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    AutoConfig.for_model("gpt2", **sizes).save_pretrained(tmp_path / "model")
    own.save(tmp_path / "model")
    changes = {"model__kind": "hf", "model__path": tmp_path / "model", "model__weights": weights}
    with pytest.raises(ConfigError, match="Rows are longer than the model's table of positions"):
        prepared(data, tmp_path, **changes, data__seq_len=25)
    assert not (tmp_path / "cache").exists()
    arguments = [f"--{name}={value}" for name, value in settings(data, tmp_path, **changes, data__seq_len=25).items()]
    assert run(["plan", *arguments]) == 2
