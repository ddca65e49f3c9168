"""Hugging Face architectures with random weights: our loss is theirs, they train, documents stay apart."""

import json
import warnings

import pytest
import torch

from tests.models.shapes import KERNELS, make_batch
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import init_weights
from tilewright.models.hf.load import load_hf
from tilewright.precision.convert import convert

VOCAB = 61
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _SIZES | _HEADS | _IDS | {"num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "word_embed_proj_dim": 32}
_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 5}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}

CAUSAL = {
    "llama": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "gpt2": _GPT2,
    "mixtral": _LLAMA | {"num_local_experts": 4},
    "gemma2": _LLAMA | {"head_dim": 8, "sliding_window": 8},  # soft caps, and eager attention
    "opt": _OPT | _IDS | {"num_attention_heads": 4, "max_position_embeddings": 64, "init_std": 0.1},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
}
MASKED = {"bert": _SIZES | _HEADS, "roberta": _SIZES | _HEADS | {"pad_token_id": 1}}
IMAGES = {"vit": _VIT | {"image_size": 32, "patch_size": 8}, "resnet": _RESNET}
DOCUMENTS = {"gemma2": "positions", "opt": "blocks", "bloom": "rows", "bert": "blocks", "roberta": "rows"}
"""How documents are kept apart; "positions" for all others."""


def make(name):
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    sizes, task = next(
        (group[name], task)
        for group, task in ((CAUSAL, "causal_lm"), (MASKED, "masked_lm"), (IMAGES, "image_classification"))
        if name in group
    )
    model = load_hf(AutoConfig.for_model(name, **sizes), task, kernels=KERNELS)
    init_weights(model, 0)
    return model


def make_inputs(model, rows=4, positions=24):
    if model.task == "image_classification":
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(rows) % 5
        pixels = torch.randn(rows, 3, 32, 32, generator=generator) + labels.view(-1, 1, 1, 1)
        return {"pixel_values": pixels, "labels": labels}
    batch = make_batch(rows, positions, seed=1, vocab=VOCAB - 3)
    batch = {"input_ids": batch["input_ids"] + 3, "labels": torch.where(batch["labels"] < 0, -100, batch["labels"] + 3)}
    if model.task == "masked_lm":
        batch["labels"] = torch.where(torch.arange(positions) % 5 == 2, batch["input_ids"], -100)
    return batch


ALL = [*CAUSAL, *MASKED, *IMAGES]


@pytest.mark.parametrize("name", ALL)
def test_loss_is_that_of_transformers(name):
    model = make(name).eval()
    batch = make_inputs(model)
    if model.task == "causal_lm":  # transformers shifts the labels itself
        batch["labels"] = torch.cat((batch["input_ids"][:, 1:], torch.full((4, 1), -100)), dim=1)
        want = model.net(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    else:
        want = model.net(**batch).loss
    out = model.loss(batch)
    assert out.count.item() == (batch["labels"] != -100).sum().item()
    assert abs(out.loss_sum.item() / out.count.item() - want.item()) < 2e-6 * want.item()


@pytest.mark.parametrize("name", ALL)
def test_it_learns_and_every_parameter_takes_part(name):
    model = make(name).train()
    batch = make_inputs(model, rows=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        out = model.loss(batch)
        out.loss_sum.backward()
        if step == 0:
            silent = [n for n, p in model.named_parameters() if p.requires_grad and not (p.grad.abs().sum() > 0)]
            # A key's bias adds the same to all scores of a query, so its gradient is zero but for rounding.
            assert not [n for n in silent if "k_proj.bias" not in n and "key.bias" not in n], silent
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss_sum.item() / out.count.item())
    assert all(loss == loss for loss in losses)
    assert losses[-1] < losses[0] - 0.05, losses


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_packed_documents_are_as_if_alone(name):
    """The loss of packed rows is the sum of the losses of their documents in rows of their own."""
    model = make(name).eval()
    batch = make_inputs(model, rows=2, positions=24)
    lengths = ((10, 11), (5, 19))
    segments = torch.tensor([[0] * 10 + [1] * 11 + [-1] * 3, [4] * 5 + [5] * 19], dtype=torch.int32)
    positions = torch.tensor([[*range(10), *range(11), 0, 0, 0], [*range(5), *range(19)]])
    batch["labels"][segments < 0] = -100
    packed = model.loss(batch | {"segments": segments, "positions": positions})
    want, count = 0.0, 0
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            piece = {key: batch[key][row : row + 1, start : start + length] for key in ("input_ids", "labels")}
            alone = make(name).eval().loss(piece)
            want, count = want + alone.loss_sum.item(), count + alone.count.item()
            start += length
    assert packed.count.item() == count
    assert abs(packed.loss_sum.item() - want) < 1e-5 * want
    assert model._style.documents == DOCUMENTS.get(name, "positions")
    assert len(model.notes) == (1 if DOCUMENTS.get(name) == "rows" else 0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("mode", ["selective", "matmuls", "attention", "full"])
def test_activation_checkpointing_is_exact(name, mode):
    model = make(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = make_inputs(model)
    grads = []
    for setting in ("none", mode):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            model.activation_checkpoint = setting
        model.zero_grad()
        model.loss(batch).loss_sum.backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    assert model.activation_checkpoint == mode
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_models_without_activation_checkpointing_say_so():
    with pytest.raises(ConfigError, match="Activation checkpointing is not supported by this model"):
        make("resnet").activation_checkpoint = "full"


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "resnet"])
def test_bf16_is_close(name):
    model = make(name).eval()
    batch = make_inputs(model)
    want = model.loss(batch).loss_sum.item()
    convert(model, "bf16_mixed")
    out = model.loss(batch)
    assert out.loss_sum.dtype == torch.float32
    assert abs(out.loss_sum.item() - want) < 2e-2 * want


def test_bidirectional_models_cannot_be_causal():
    from transformers import BertConfig

    model = load_hf(BertConfig(**_SIZES | _HEADS), "causal_lm")
    with pytest.raises(ConfigError, match="Model attends to the tokens that it should predict"):
        model.loss(make_inputs(model))


def test_first_weights_are_a_function_of_the_seed():
    one, two, three = make("gpt2"), make("gpt2"), make("gpt2")
    torch.manual_seed(99)
    init_weights(two, 0)
    init_weights(three, 1)
    weights = [dict(model.named_parameters()) for model in (one, two, three)]
    matrices = [name for name, param in weights[0].items() if param.dim() > 1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(torch.equal(weights[0][name], weights[2][name]) for name in matrices)
    spread = weights[0]["net.transformer.h.0.mlp.c_proj.weight"].std().item()
    assert abs(spread - 0.02 / 2) < 2e-3, "GPT-2's own rule for residual projections took part"


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_folders_round_trip(name, tmp_path):
    model = make(name).eval()
    batch = make_inputs(model)
    model.save_hf(tmp_path, extra={"note": "kept"})
    again = load_hf(tmp_path, model.task, "load").eval()
    assert torch.equal(again.loss(batch).loss_sum, model.loss(batch).loss_sum)
    assert json.loads((tmp_path / "config.json").read_text())["note"] == "kept"
    assert load_hf(tmp_path, model.task, device="meta").net.device.type == "meta"


def test_saving_in_bf16(tmp_path):
    model = make("qwen3")
    model.save_hf(tmp_path, dtype=torch.bfloat16)
    assert model.net.dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    weight = load_hf(tmp_path, "causal_lm", "load").net.lm_head.weight
    assert torch.equal(weight, model.net.lm_head.weight.bfloat16().float())


def broken(folder, how):
    config = folder / "config.json"
    if how == "no folder":
        return folder / "nowhere"
    if how == "no config":
        config.unlink()
    elif how == "broken config":
        config.write_text("{")
    elif how == "unknown model":
        config.write_text('{"model_type": "wishful"}')
    elif how == "impossible values":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_attention_heads": 5}))
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "corrupt weights":
        (folder / "model.safetensors").write_bytes(b"\0" * 100)
    elif how == "weights of another size":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 40}))
    elif how == "weights of another depth":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    return folder


@pytest.mark.parametrize(
    "how",
    [
        *("no folder", "no config", "broken config", "unknown model", "impossible values"),
        *("no weights", "corrupt weights", "weights of another size", "weights of another depth"),
    ],
)
def test_bad_folders(how, tmp_path):
    make("llama").save_hf(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_hf(broken(tmp_path, how), "causal_lm", "load")
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_, problem.where))


def test_wrong_task():
    from transformers import ViTConfig

    with pytest.raises(ConfigError, match="Task causal_lm is not supported"):
        load_hf(ViTConfig(**_VIT), "causal_lm")


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_a_model_whose_checkpointing_was_never_set_is_compiled(name, tmp_path):
    """As an export's baseline loads one; layers compile when they first run."""
    model = make(name)
    model.net.save_pretrained(tmp_path)
    load_hf(tmp_path, model.task, "load").compile_blocks()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_compiled_models_compute_the_same(name):
    torch._dynamo.reset()
    model = make(name).eval()
    batch = make_inputs(model)
    model.loss(batch).loss_sum.backward()
    want = [param.grad.clone() for param in model.parameters()]
    model.compile_blocks()
    model.zero_grad()
    model.loss(batch).loss_sum.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for param, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-3, atol=1e-4)
