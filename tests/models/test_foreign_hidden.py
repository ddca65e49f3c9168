"""Hidden values that layers of transformers' models learn: against plain autograd in FP64, whole and layer by layer."""

import pytest
import torch
import transformers
from torch.nn.functional import linear

from tilewright.core.errors import ConfigError
from tilewright.models.build import layered
from tilewright.models.distill import loss as distill
from tilewright.models.distill.hidden import VALUES, HiddenLoss, Pair, of_batch
from tilewright.models.hf.model import HFModel
from tilewright.models.teacher_folder import stream_width

WORDS, WIDTH, THEIRS, LAYERS = 50, 16, 8, 3
PAIRS = [Pair("hidden", 0, 4), Pair("hidden", 2, 1), Pair("attention", 2, 0), Pair("attention", 1, 3)]
WEIGHTS = {"hidden": 0.75, "attention": 0.5}
ATTENTION = {"qwen3": "self_attn", "gpt2": "attn", "opt": "self_attn"}
NETS = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=WIDTH, word_embed_proj_dim=8, ffn_dim=24, num_hidden_layers=LAYERS,
        num_attention_heads=2, max_position_embeddings=32, dropout=0, do_layer_norm_before=False,
    )),
}  # fmt: skip


def student(name):
    torch.manual_seed(0)
    model = HFModel(NETS[name](), "causal_lm")
    assert stream_width(model) == WIDTH
    model.hidden_loss = HiddenLoss(PAIRS, (WIDTH, THEIRS), WEIGHTS, learned=True)
    for projection in model.hidden_loss.projections:
        torch.nn.init.normal_(projection, std=0.3)
    return model.double().train()


def taught_batch(model, rows=2, length=7):
    head = model.net.get_output_embeddings().weight.shape[1]
    labels = torch.randint(WORDS, (rows, length))
    labels[0, 2:4] = -100
    return {
        "input_ids": torch.randint(WORDS, (rows, length)),
        "labels": labels,
        VALUES: torch.randn(rows, length, len(PAIRS), THEIRS, dtype=torch.float64),
        distill.HIDDEN: torch.randn(rows, length, head, dtype=torch.float64),
        distill.HEAD: torch.randn(WORDS, head, dtype=torch.float64),
        distill.HOW: distill.how(1.0, 0.5, "forward_kl"),
    }


def by_hand(name, model, batch):
    """From what plain hooks see of the layers and of their attention."""
    seen = {}
    handles = [
        module.register_forward_hook(lambda module, args, out, place=(target, index): seen.__setitem__(place, out))
        for index, layer in enumerate(model.layers)
        for target, module in (("hidden", layer), ("attention", getattr(layer, ATTENTION[name])))
    ]
    model.activation_checkpoint = "none"
    loss = model.loss({name: tensor for name, tensor in batch.items() if name != VALUES}).loss_sum
    for handle in handles:
        handle.remove()
    kept = batch["labels"] != -100
    for place, pair in enumerate(PAIRS):
        ours = seen[pair.target, pair.ours]
        ours = ours[0] if isinstance(ours, tuple) else ours
        ours, theirs = linear(ours, model.hidden_loss.projections[place])[kept], batch[VALUES][:, :, place][kept]
        each = (ours - theirs).square().sum(-1) / theirs.square().sum(-1)
        loss = loss + WEIGHTS[pair.target] / 2 * each.sum()
    return loss


@pytest.mark.parametrize("kept", ["none", "full"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.support("teacher", "one")
def test_loss_and_gradients_are_those_of_autograd(name, kept):
    model = student(name)
    batch = taught_batch(model)
    model.activation_checkpoint = kept
    out = model.loss(batch)
    (0.5 * out.loss_sum).backward()
    found = {key: param.grad.clone() for key, param in model.named_parameters()}
    model.zero_grad()
    expected = by_hand(name, model, batch)
    (0.5 * expected).backward()
    # bound: logits and losses of rows are FP32
    assert float(out.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(out.each.sum()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for key, param in model.named_parameters():
        assert (found[key] - param.grad).abs().max() <= 2e-6 * param.grad.abs().max() + 1e-12, key


@pytest.mark.parametrize("name", NETS)
def test_layers_that_run_alone_have_the_same_gradients(name):
    """As the layer-major executor runs them. Parameters of projections belong to both ends, as what layers share."""
    model = student(name)
    batch, view = taught_batch(model), layered(model)
    (model.loss(batch).loss_sum * 0.5).backward()
    expected = {key: param.grad.clone() for key, param in model.named_parameters()}
    own = set(model.hidden_loss.parameters())
    assert all(own <= set(end) for end in view.outer_parameters())
    model.zero_grad()
    with torch.no_grad():
        x, context = view.prologue(batch)
        xs = [x]
        for layer in range(LAYERS):
            xs.append(view.layer(layer, xs[-1], context)[0])
    last = xs[-1].detach().requires_grad_()
    (view.epilogue(last, context, batch).loss_sum * 0.5).backward()
    grad = last.grad
    for layer in reversed(range(LAYERS)):
        start = xs[layer].detach().requires_grad_()
        view.layer(layer, start, context)[0].backward(grad)
        grad = start.grad
    view.prologue(batch)[0].backward(grad)
    for key, param in model.named_parameters():
        assert (param.grad - expected[key]).abs().max() <= 1e-12 * expected[key].abs().max() + 1e-15, key


def test_several_streams_are_refused():
    """As Gemma 3n has them: [streams, B, S, D] would be compared with the wrong thing."""
    model = student("qwen3")
    batch = taught_batch(model)
    with pytest.raises(ConfigError, match="no stream of positions") as error:
        model.hidden_loss(0, torch.zeros(4, 2, 7, WIDTH), None, of_batch(batch))
    assert error.value.problems[0].where == "distill.hidden"


def test_attention_that_gives_nothing_is_refused():
    """As where a layer does not call it, or where it was compiled with its layer."""
    model = student("qwen3")
    with pytest.raises(ConfigError, match="Attention of a layer gives no stream") as error:
        model.hidden_loss(1, torch.zeros(2, 7, WIDTH), None, of_batch(taught_batch(model)))
    assert error.value.problems[0].where == "distill.attention"
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)
