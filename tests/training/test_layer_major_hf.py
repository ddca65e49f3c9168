"""Hugging Face models under the layer-major executor: found, cut, and equal to plain PyTorch."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.models.test_hf_models import make, make_inputs
from tests.training.test_layer_major_step import LR, executor, reference, worst
from tilewright.core.hardware import detect_machine
from tilewright.models.build import layered
from tilewright.models.layerwise.hf_view import HFLayers
from tilewright.models.layerwise.layer_view import SingleBlock, find_layer_groups
from tilewright.ops.backends.native import loss
from tilewright.ops.backends.native.loss import ChunkStep, masked_softmax_, row_lse
from tilewright.ops.kernels import Kernels
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

SIZES = (3, 1, 2, 1)
CUT = ["llama", "qwen3", "mixtral", "gpt2", "bert", "vit", "gemma2", "opt", "bloom", "roberta"]


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def drop_key_biases(*models):
    """A key's bias adds the same to all scores of a query: its gradient is rounding, and AdamW moves by its sign."""
    for model in models:
        for name, param in model.named_parameters():
            if name.endswith(("key.bias", "k_proj.bias")):
                param.data.zero_()


def steps(model, num=5):
    made = []
    for step in range(num):
        batch = make_inputs(model, rows=sum(SIZES), positions=12)
        batch = {name: tensor.roll(step, 0) for name, tensor in batch.items()}
        parts = [torch.split(tensor, SIZES) for tensor in batch.values()]
        made.append([dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)])
    return made


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "vit", "qwen3")]
"""By default those of the zoo have the steps of the standard executor (`tests/zoo/test_layer_major.py`)."""


@pytest.mark.parametrize("name", ["mixtral", "gpt2", *OTHERS])
def test_five_steps_are_those_of_torch_adamw(name):
    """llama: grouped heads; mixtral: experts; gpt2 and qwen3: tied; bert: masked; vit: images."""
    ours = without_dropout(make(name))
    theirs = copy.deepcopy(ours)
    made = steps(ours)
    norms = reference(theirs, made, LR, max_norm=0.5)
    view = layered(ours)
    assert isinstance(view, HFLayers), ours.notes
    run = executor(ours, view, clip=GradClip(0.5))
    results = [run.step(microbatches, LR) for microbatches in made]
    drop_key_biases(ours, theirs)
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)


def test_the_loss_of_a_cut_model_is_the_compiled_one(monkeypatch):
    """Eager loops of the loss hold five times the logits of a tile: they must not run behind the plan's back."""
    counter = CompileCounter()
    step = ChunkStep(*(torch.compile(part, backend=counter) for part in (row_lse, masked_softmax_)))
    monkeypatch.setattr(loss, "_compiled_step", lambda: step)
    model = without_dropout(make("llama"))
    model.kernels = Kernels(detect_machine("cpu"), {"cross_entropy": "compiled"})
    view = layered(model)
    assert counter.frame_count == 0  # looking for the blocks compiles nothing
    executor(model, view, clip=GradClip(0.5)).step(steps(model, 1)[0], LR)
    assert counter.frame_count >= 2


@pytest.mark.parametrize("name", CUT)
def test_blocks_are_found_and_every_parameter_is_in_one_slice(name):
    model = make(name)
    view = layered(model)
    assert isinstance(view, HFLayers), model.notes
    assert len(view.blocks) == 2
    layer_groups = find_layer_groups(model, view)
    owned = [param for part in layer_groups for param in part.params]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    tied = model.task != "image_classification" and model.net.config.tie_word_embeddings
    assert bool(layer_groups.shared.params) == bool(tied)


def test_a_model_with_batch_norms_is_kept_whole_and_right():
    ours = make("resnet").train()
    theirs = copy.deepcopy(ours)
    made = steps(ours, 2)
    view = layered(ours)
    assert isinstance(view, SingleBlock)
    assert "whole, as one layer group" in ours.notes[0]
    run = executor(ours, view)
    plain = StandardExecutor(theirs, type(run.optimizer)(theirs.parameters()), clip=GradClip(0.0))
    for group in (*run.optimizer.param_groups, *plain.optimizer.param_groups):
        group["weight_decay"] = 0.0
    for microbatches in made:
        assert run.step(microbatches, LR).loss == plain.step(microbatches, LR).loss
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)


class Leaky(nn.Module):
    """A block that also adds to what it read a running mean: a forward pass changes the next one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden_states, *args, **kwargs):
        if self.training:
            self.mean.add_(0.1)
        return self.inner(hidden_states + self.mean, *args, **kwargs)


def test_a_block_that_is_not_re_entrant_is_said_and_kept_whole():
    model = make("llama")
    model.net.model.layers[0] = Leaky(model.net.model.layers[0])
    assert isinstance(layered(model), SingleBlock)
    assert "changes net.model.layers.0.mean" in model.notes[-1]
    assert model.net.model.layers[0].mean == 0, "trying it leaves the buffer as it was"


def test_a_model_that_reads_its_layers_elsewhere_is_kept_whole():
    model = make("llama")
    first = []
    model.net.model.layers[0].register_forward_hook(lambda *args: first.append(args[-1]))
    model.net.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + first[-1],))
    assert isinstance(layered(model), SingleBlock)
    assert "not the same model" in model.notes[-1]


def test_dropout_is_replayed():
    """With dropout, the sliced model has the gradient of its own layer-major graph, kept whole by autograd."""
    ours = make("bert").train()
    theirs = copy.deepcopy(ours)
    made = steps(ours, 2)
    view, twin = layered(ours), layered(theirs)
    run = executor(ours, view)
    torch.manual_seed(3)
    for microbatches in made:
        run.step(microbatches, LR)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(decay_groups(theirs, 0.1), lr=LR, betas=(0.9, 0.95))
    for microbatches in made:
        total = sum(int((batch["labels"] != -100).sum()) for batch in microbatches)
        starts = [twin.prologue(batch) for batch in microbatches]
        xs = [x for x, _ in starts]
        for index in range(len(twin.blocks)):
            xs = [twin.layer(index, x, context)[0] for x, (_, context) in zip(xs, starts, strict=True)]
        rows = zip(xs, starts, microbatches, strict=True)
        sum(twin.epilogue(x, context, batch).loss_sum for x, (_, context), batch in rows).div(total).backward()
        optimizer.step()
        optimizer.zero_grad()
    drop_key_biases(ours, theirs)
    assert worst(ours, theirs)[0] <= 1e-6, worst(ours, theirs)


@pytest.mark.parametrize(("name", "mode"), [("llama", "bf16_mixed"), ("gpt2", "bf16_mixed"), ("llama", "fp8_tile")])
def test_precision_regions_hold_around_single_layers(name, mode):
    """Losses are those of the standard executor in the same mode, to the last bit; weights after a step nearly so."""
    ours, theirs = (without_dropout(make(name)) for _ in range(2))
    for model in (ours, theirs):
        convert(model, mode)
    made = steps(ours, 2)
    run = executor(ours, layered(ours))
    plain = StandardExecutor(theirs, executor(theirs, SingleBlock(theirs)).optimizer, clip=GradClip(0.0))
    assert run.step(made[0], LR).loss == plain.step(made[0], LR).loss
    assert run.step(made[1], LR).loss == pytest.approx(plain.step(made[1], LR).loss, rel=1e-4)
    assert math.isfinite(worst(ours, theirs)[0])
