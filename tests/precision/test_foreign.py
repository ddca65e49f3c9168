"""Hugging Face models and others that are not ours: functions inside forwards, foreign norms and routers, regions."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.cover import covering
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.models.hf.model import HFModel
from tilewright.ops.kernels import Kernels
from tilewright.precision.assign.module_kinds import find_sites
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.policy.policy import Policy, Rule

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def build(name: str) -> nn.Module:
    """A tiny model of an architecture, random weights, dropout off."""
    import transformers as hf

    torch.manual_seed(0)
    configs = {
        "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**SHAPE)),
        "llama_eager": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**SHAPE, attn_implementation="eager")),
        "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SHAPE, head_dim=8)),
        "mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig(**SHAPE, num_local_experts=4)),
        "bert": lambda: (hf.BertForMaskedLM, hf.BertConfig(**SMALL, vocab_size=100)),
        "gpt2": lambda: (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0),
        ),
        "vit": lambda: (hf.ViTForImageClassification, hf.ViTConfig(**SMALL, image_size=32, patch_size=8)),
        "resnet": lambda: (
            hf.ResNetForImageClassification,
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        ),
    }
    cls, config = configs[name]()
    return cls(config).eval()


ALL = ("llama", "llama_eager", "qwen3", "mixtral", "bert", "gpt2", "vit", "resnet")


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(0, 100, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_and_gradient(model: nn.Module, name: str) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    out = model(**inputs(name))
    out.loss.backward()
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return out.loss.item(), torch.cat(grads)


@pytest.mark.parametrize(
    ("name", "mode"),  # `zoo/test_convert` has more families in each mode
    covering(ALL, ("fp32", "tf32", "bf16_mixed", "hybrid", "pure_fp16", "fp8_tile", "fp8_tensorwise"), pairs=False),
)
def test_any_architecture_in_any_mode(name, mode):
    model = build(name)
    want = loss_and_gradient(model, name)
    convert(model, mode)
    got = loss_and_gradient(model, name)
    bound = {"fp32": 0.0, "tf32": 5e-4, "bf16_mixed": 3e-3, "hybrid": 3e-3, "pure_fp16": 5e-4}.get(mode, 2e-2)
    assert abs(got[0] - want[0]) <= bound * want[0], f"{got[0]} against {want[0]}"
    cosine = torch.cosine_similarity(got[1], want[1], dim=0).item()
    least = {"fp32": 1 - 1e-9, "tf32": 1 - 1e-4, "fp8_tile": 0.97, "fp8_tensorwise": 0.85}
    assert cosine >= least.get(mode, 0.99), f"cosine {cosine}"
    out = model(**inputs(name))
    assert (out.loss.dtype, out.logits.dtype) == (torch.float32, torch.float32)
    with evaluating(model):
        assert abs(model(**inputs(name)).loss.item() - want[0]) <= (2e-4 if mode == "pure_fp16" else 0.0)


def test_the_report_says_what_is_in_8_bits_and_why_the_rest_is_not():
    llama, gpt2 = build("llama"), build("gpt2")
    rows = {row.fqn: row for row in convert(llama, "fp8_tile").precision_report.rows}
    assert rows["model.layers.0.mlp.up_proj"].compute == "fp8_tile"
    assert rows["model.layers.0.self_attn.o_proj"].compute == "fp8_tile/bf16/bf16"
    assert rows["lm_head"].compute == rows["model.embed_tokens"].compute == "bf16"
    assert rows["model.norm"].compute == "fp32"
    text = str(llama.precision_report)
    assert "linear layers only, without the head" in text
    # GPT-2 multiplies by a class of its own, whose weight is stored the other way round.
    row = next(row for row in convert(gpt2, "fp8_tile").precision_report.rows if row.fqn.endswith("c_fc"))
    assert row.compute == "fp8_tile"


def dtypes_inside(model: nn.Module, fqn: str, call) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the first input and output of a submodule."""
    seen = []
    module = model.get_submodule(fqn)

    def note(_, args, output):
        first = output[0] if isinstance(output, tuple) else output
        seen.append((args[0].dtype, first.dtype))

    handle = module.register_forward_hook(note)
    call()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("mode", "stream"),
    [("bf16_mixed", torch.bfloat16), ("hybrid", torch.float32), ("pure_fp16", torch.float16), ("tf32", torch.float32)],
)
def test_residual_stream_of_a_foreign_model(mode, stream):
    model = build("llama")
    convert(model, mode)
    assert dtypes_inside(model, "model.layers.1", lambda: model(**inputs("llama"))) == (stream, stream)
    assert dtypes_inside(model, "model.norm", lambda: model(**inputs("llama"))) == (stream, stream)


class NaiveNorm(nn.Module):
    """Computes in whatever comes in, as homemade norms do."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / (x - mean).square().mean(-1, keepdim=True).sqrt() * self.scale


def test_a_homemade_norm_gets_fp32_statistics():
    torch.manual_seed(0)
    norm = NaiveNorm(64)
    x = (torch.randn(4, 64) + 100).bfloat16()
    want = norm(x.double())
    assert (norm(x).double() - want).abs().max() > 0.05
    convert(norm, "bf16_mixed")
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_kinds_by_structure():
    kinds = {name: {site.fqn: site.kind for site in find_sites(build(name))} for name in ("mixtral", "bert", "gpt2")}
    assert kinds["mixtral"]["model.layers.0.mlp.gate"] == "router"
    assert kinds["mixtral"]["model.norm"] == "norm"
    assert kinds["mixtral"]["lm_head"] == "head"
    assert kinds["bert"]["cls.predictions.decoder"] == "head"
    assert kinds["gpt2"]["lm_head"] == "head"
    assert kinds["gpt2"]["transformer.h.0.attn.c_attn"] == "linear"
    assert kinds["mixtral"]["model.layers.0.mlp.experts.down_proj"] == "experts"


def test_a_foreign_router_computes_in_fp32():
    model = build("mixtral")
    router = model.model.layers[0].mlp.gate
    x = torch.randn(6, 32).bfloat16()
    want = router(x.float())
    convert(model, "bf16_mixed")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = router(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_rule_reaches_modules_that_use_parameters_in_their_own_way():
    model = build("gpt2")
    rule = Rule("*.c_fc", compute="fp32")
    report = convert(model, Policy("bf16_mixed", (rule,))).precision_report
    assert {row.fqn: row.compute for row in report.rows}["transformer.h.0.mlp.c_fc"] == "fp32"
    assert report.unmatched == ()
    x = torch.randn(1, 4, 32)
    layer = model.transformer.h[0].mlp.c_fc
    assert torch.equal(layer(x), (x @ layer.weight + layer.bias).bfloat16())
    other = model.transformer.h[0].mlp.c_proj
    assert other(torch.randn(1, 4, 128)).dtype == torch.bfloat16


class Positions(nn.Module):
    """Adds a parameter, as vision transformers do, and multiplies by another in a way of its own."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 8))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x) + self.position, x @ self.weight


@pytest.mark.parametrize(
    ("mode", "stream", "matmul"),
    [
        ("bf16_mixed", torch.bfloat16, torch.bfloat16),
        ("hybrid", torch.float32, torch.bfloat16),
        ("pure_fp16", torch.float16, torch.float16),
    ],
)
def test_parameters_that_are_added_do_not_change_the_stream(mode, stream, matmul):
    model = nn.ModuleDict({"inner": Positions(), "other": nn.Linear(2, 2)})
    convert(model, mode)
    added, multiplied = model["inner"](torch.randn(2, 4, 8))
    assert (added.dtype, multiplied.dtype) == (stream, matmul)


@pytest.mark.parametrize("mode", ["bf16_mixed", "pure_fp16"])
def test_a_rule_on_a_module_with_children_holds(mode):
    """It is a place of entry too, whose region must not be overwritten; its parameters are FP32 then."""
    model = nn.ModuleDict({"inner": Positions(), "other": nn.Linear(2, 2)})
    convert(model, Policy(mode, (Rule("inner", compute="fp32"),), fp32_ops=("softmax",)))
    x = torch.randn(2, 4, 8)
    _, multiplied = model["inner"](x)
    want = (x @ model["inner"].weight.float()).to(torch.bfloat16 if mode == "bf16_mixed" else torch.float16)
    assert torch.equal(multiplied, want)
    assert model["inner"].weight.dtype == torch.float32
    assert model["inner"].proj.compute_dtype != torch.float32


def test_torchs_attention_module_as_one_unit():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 32)
    want = model(x)
    report = convert(model, "bf16_mixed").precision_report
    assert "self_attn" in {row.fqn for row in report.rows}
    assert "self_attn.out_proj" not in {row.fqn for row in report.rows}
    out = model(x)
    assert out.dtype == torch.float32
    assert (out - want).abs().max() < 0.05
    convert(model, Policy("bf16_mixed", (Rule(op="attention", compute="fp32"),)))
    assert dtypes_inside(model, "self_attn", lambda: model(x)) == (torch.float32, torch.bfloat16)


# ---- functions kept in FP32 ----


class Functions(nn.Module):
    """Calls functions and notes the dtypes that they saw."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.seen = {}

    def forward(self, x):
        x = self.proj(x)
        self.seen["softmax"] = F.softmax(x, dim=-1).dtype, torch.softmax(x, -1).dtype, x.softmax(-1).dtype
        self.seen["asked"] = F.softmax(x, dim=-1, dtype=torch.float32).dtype
        self.seen["matmul"] = (x @ x.mT).dtype
        return x


def test_fp32_ops_run_in_fp32_and_return_16_bit():
    model = Functions()
    convert(model, Policy("bf16_mixed", fp32_ops=("softmax", "matmul")))
    model(torch.randn(4, 8))
    assert model.seen["softmax"] == (torch.bfloat16,) * 3
    assert model.seen["asked"] == torch.float32
    assert model.seen["matmul"] == torch.bfloat16


def test_fp32_softmax_is_rounded_once():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x):
            scores = self.proj(x)
            return scores, F.gelu(scores * 3)

    torch.manual_seed(0)
    model = Scores()
    convert(model, Policy("bf16_mixed", fp32_ops=("gelu",)))
    scores, out = model(torch.randn(64, 8))
    matmul = (scores.bfloat16() * 3).float()
    assert torch.equal(out, F.gelu(matmul).bfloat16().float())


def test_fp32_ops_survive_recomputation():
    """torch restores autocast when a layer is recomputed, but no function mode: the layers bring their own."""
    model = build("llama_eager").train()
    convert(model, Policy("bf16_mixed", fp32_ops=("softmax", "matmul")))
    want = loss_and_gradient(model, "llama_eager")
    model.gradient_checkpointing_enable()
    got = loss_and_gradient(model, "llama_eager")
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


# ---- regions as good neighbours ----


def test_regions_follow_a_switch_of_mode():
    model = build("llama")
    want = loss_and_gradient(model, "llama")
    convert(model, Policy("bf16_mixed", fp32_ops=("softmax",)))
    set_mode(model, Policy("fp32"))
    got = loss_and_gradient(model, "llama")
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


def test_submodules_that_are_entered_directly_have_a_region_too():
    model = build("llama")
    convert(model, "bf16_mixed")
    hidden = model.model(input_ids=inputs("llama")["input_ids"]).last_hidden_state
    assert hidden.dtype == torch.bfloat16


def test_autocast_ends_with_the_forward_even_after_an_error():
    model = Functions()
    convert(model, "bf16_mixed")
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 7))
    assert not torch.is_autocast_enabled("cpu")


def test_a_converted_model_is_still_what_it_was():
    import transformers as hf

    model = build("llama")
    signature = inspect.signature(model.forward)
    names = list(model.state_dict())
    convert(model, "bf16_mixed")
    assert isinstance(model, hf.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == names


def test_a_converted_model_copies_pickles_saves_and_loads(tmp_path):
    import transformers as hf

    model = build("llama")
    convert(model, "bf16_mixed")
    want = model(**inputs("llama")).loss.item()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(**inputs("llama")).loss.item() == want
        assert twin.lm_head.weight is not model.lm_head.weight
    model.save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    convert(loaded, "bf16_mixed")
    assert loaded(**inputs("llama")).loss.item() == want


def test_a_forward_replaced_by_another_tool_is_refused():
    model = Functions()
    model.forward = model.forward
    with pytest.raises(ConfigError, match="Module forward was replaced by another library"):
        convert(model, "bf16_mixed")


@pytest.mark.slow
def test_whole_model_compiles_to_one_graph():
    model = build("llama").train()
    convert(model, Policy("bf16_mixed", fp32_ops=("softmax",)))
    want = loss_and_gradient(model, "llama")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = loss_and_gradient(compiled, "llama")
    assert got[0] == pytest.approx(want[0], rel=1e-4)
    with evaluating(model):
        exact = model(**inputs("llama")).loss.item()
        assert compiled(**inputs("llama")).loss.item() == pytest.approx(exact, rel=1e-6)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
@pytest.mark.parametrize("mode", ["tf32", "bf16_mixed", "hybrid", "pure_fp16"])
def test_our_wrapper_of_hugging_face_models(name, mode):
    """Its loss enters the model below the root, and takes the head's weight without calling the head."""
    task = {"llama": "causal_lm", "bert": "masked_lm", "vit": "image_classification"}[name]
    model = HFModel(build(name), task, Kernels(detect_machine(), compile=False))
    want = model.loss(inputs(name))
    convert(model, mode)
    got = model.loss(inputs(name))
    assert got.loss_sum.dtype == torch.float32
    assert got.loss_sum.item() == pytest.approx(want.loss_sum.item(), rel={"tf32": 2e-4}.get(mode, 3e-3))
    if name == "llama":
        low = {"tf32": torch.float32, "pure_fp16": torch.float16}.get(mode, torch.bfloat16)
        assert model.net.lm_head.compute_dtype == low
        assert torch.is_autocast_enabled("cpu") is False
    with evaluating(model):
        assert model.loss(inputs(name)).loss_sum.item() == pytest.approx(
            want.loss_sum.item(), rel=2e-4 if mode == "pure_fp16" else 1e-7
        )
