"""FP8 reaches the work of models whose linear layers are not nn.Linear: GPT-2's Conv1D, stacked experts of mixtures."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.cover import covering
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.audit import Audit
from tilewright.precision.float8.third_party import tile_weights
from tilewright.precision.policy.policy import Policy, Rule

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def build(name: str) -> nn.Module:
    import transformers as hf

    configs = {
        "gpt2": lambda: hf.GPT2Config(
            **{"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64},
            **{"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ),
        "mixtral": lambda: hf.MixtralConfig(**SIZES, **HEADS, **TOKENS, intermediate_size=160, num_local_experts=6),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **SIZES, **HEADS, **TOKENS, moe_intermediate_size=160, num_experts=6, num_experts_per_tok=2
        ),
        "gpt_oss": lambda: hf.GptOssConfig(
            **SIZES, **HEADS, **TOKENS, intermediate_size=160, num_local_experts=6, num_experts_per_tok=2
        ),
        "deepseek_v3": lambda: hf.DeepseekV3Config(
            **SIZES, **TOKENS, intermediate_size=256, moe_intermediate_size=160, n_routed_experts=6, n_group=2,
            topk_group=2, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_attention_heads=4, num_key_value_heads=4,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(configs[name]())


NAMES = ("gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
STORED = {"gpt2": "transformer.h.0.mlp.c_fc", "mixtral": "model.layers.0.mlp.experts.down_proj"}
"""Rows whose weight no nn.Linear owns."""


class SameChoices(TorchFunctionMode):
    """Experts chosen by a first pass are chosen again by later ones: rounding shall not decide whom to compare."""

    def __init__(self) -> None:
        super().__init__()
        self._indices: list[torch.Tensor] = []
        self._next: int | None = None

    def again(self) -> "SameChoices":
        self._next = 0
        return self

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        if self._next is None:
            self._indices.append(out.indices)
            return out
        indices, self._next = self._indices[self._next], self._next + 1
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def ids() -> torch.Tensor:
    return torch.randint(0, 64, (4, 48), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def noise(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative error of all gradients together."""
    wrong = sum((ours[name] - want).square().sum() for name, want in theirs.items())
    return (wrong / sum(want.square().sum() for want in theirs.values())).sqrt().item()


def share_of_linear_work(report, mode: str) -> float:
    """Of the work of linear layers without the head and routers, what is in the mode's format."""
    rows = [row for row in report.rows if row.op in ("linear", "experts", "other", "attention")]
    done = sum(row.work * sum(name == mode for name in (row.formats * 3)[:3]) / 3 for row in rows)
    return done / sum(row.work for row in rows)


@pytest.mark.parametrize(("name", "mode"), covering(NAMES, ("fp8_tile", "fp8_hybrid", "fp8_tensorwise"), pairs=False))
def test_fp8_reaches_the_work_and_its_noise_is_that_of_fp8(name, mode):
    model = build(name)
    choices = SameChoices()
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # torch's grouped matmul takes no FP64
    with choices:
        exact, reference = loss_and_gradients(wide)
    low = copy.deepcopy(model)
    convert(low, "bf16_mixed")
    with choices.again():
        bf16, rough = loss_and_gradients(low)
    report = convert(model, mode).precision_report
    assert share_of_linear_work(report, mode) > 0.9
    with choices.again():
        fp8, ours = loss_and_gradients(model)
    assert abs(bf16 - exact) < 0.003 * exact
    assert abs(fp8 - exact) < 0.01 * exact, f"{fp8} against {bf16} in BF16 and {exact} in FP64"
    assert ours.keys() == reference.keys()
    assert noise(rough, reference) < 0.03
    assert noise(ours, reference) < 0.3, noise(ours, reference)
    for layer, want in reference.items():
        found = noise({layer: ours[layer]}, {layer: want})
        assert found < 0.6, f"{layer}: relative error {found}"


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "gpt2")]
)
def test_twenty_steps_in_fp8_learn_what_bf16_learns(name):
    losses = {}
    for mode in ("bf16_mixed", "fp8_tile"):
        model = build(name)
        convert(model, mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[mode] = []
        for _ in range(20):
            loss = model(input_ids=ids()[:2], labels=ids()[:2]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[mode].append(loss.item())
    first, last = losses["fp8_tile"][0], losses["fp8_tile"][-1]
    assert last < first - 1.0, losses["fp8_tile"]
    assert abs(last - losses["bf16_mixed"][-1]) < 0.15 * first, losses


@pytest.mark.parametrize("name", NAMES)
def test_the_audit_counts_what_ran(name):
    model = build(name)
    convert(model, "fp8_tile")
    audit = Audit(model)
    loss_and_gradients(model)
    given = tile_weights(model)
    assert given
    rows = {(row.layer, row.gemm): row for row in audit.rows()}
    for layer, weight in given.items():
        for gemm in ("fprop", "dgrad", "wgrad"):
            row = rows[layer, gemm]
            assert row.format == getattr(weight.matmuls.gemms, gemm).name
            matrices = weight.parameter.shape[0] if weight.parameter.ndim == 3 else 1
            assert 1 <= row.calls <= matrices
    before, resumed = audit.rows(), Audit(model)
    resumed.load_state_dict(audit.state_dict())
    assert resumed.rows() == before
    loss_and_gradients(model)
    after = {(row.layer, row.gemm): row.calls for row in resumed.rows()}
    assert all(after[row.layer, row.gemm] == 2 * row.calls for row in before if row.layer in given)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gpt_oss"])
def test_a_converted_model_stays_a_pytorch_citizen(name, tmp_path):
    model = build(name)
    state, parameters = {k: v.clone() for k, v in model.state_dict().items()}, list(model.parameters())
    classes = [type(module) for module in model.modules()]
    convert(model, "fp8_tile")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), classes, strict=True))
    want, gradients = loss_and_gradients(model)
    copies = {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    torch.save(model, tmp_path / "model.pt")
    copies["torch.save"] = torch.load(tmp_path / "model.pt", weights_only=False)
    for way, other in copies.items():
        loss, theirs = loss_and_gradients(other)
        assert loss == want, way
        assert all(torch.equal(theirs[key], value) for key, value in gradients.items()), way
        counts = [given.matmuls.counts for given in tile_weights(other).values()]
        assert not {count.data_ptr() for count in counts} & {
            given.matmuls.counts.data_ptr() for given in tile_weights(model).values()
        }, f"{way}: counts are shared"
    model.save_pretrained(tmp_path / "saved")
    again = type(build(name)).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(again.state_dict()[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_modes_switch_and_evaluation_is_exact(name):
    plain = build(name)
    model = copy.deepcopy(plain)
    convert(model, "fp8_tile")
    with torch.no_grad():
        want = plain(input_ids=ids()).logits
        low = model(input_ids=ids()).logits
        with evaluating(model):
            torch.testing.assert_close(model(input_ids=ids()).logits, want, rtol=0, atol=1e-5)
        assert torch.equal(model(input_ids=ids()).logits, low)
        for mode in ("bf16_mixed", "fp8_tensorwise", "fp32", "hybrid"):
            set_mode(model, mode)
            fresh = copy.deepcopy(plain)
            convert(fresh, mode)
            assert torch.equal(model(input_ids=ids()).logits, fresh(input_ids=ids()).logits), mode


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_rules_reach_single_weights(name):
    row = STORED[name]
    kind = "experts" if name == "mixtral" else "linear"
    for rule, compute in (
        (Rule(row, compute="bf16"), "bf16"),
        (Rule(row, wgrad="bf16"), "fp8_tile/fp8_tile/bf16"),
        (Rule("*", op=kind, compute="fp32"), "fp32"),
        (Rule("*", op="linear", compute="fp8_hybrid"), "fp8_hybrid"),
    ):
        model = build(name)
        report = convert(model, Policy("fp8_tile", (rule,))).precision_report
        found = {each.fqn: each for each in report.rows}[row]
        assert (found.op, found.compute) == (kind, compute), str(rule)
        loss, gradients = loss_and_gradients(model)
        assert loss == loss
        assert all(grad.isfinite().all() for grad in gradients.values())


def test_parameters_stored_in_16_bits():
    model = build("mixtral")
    convert(model, Policy("fp8_tile", parameters="bf16"))
    experts = model.model.layers[0].mlp.experts
    assert (experts.down_proj.dtype, model.model.layers[0].mlp.gate.weight.dtype) == (torch.bfloat16, torch.float32)
    loss_and_gradients(model)
    assert experts.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_inputs_without_gradients_and_frozen_weights(name):
    model = build(name)
    convert(model, "fp8_tile")
    want, gradients = loss_and_gradients(model)
    given = tile_weights(model)[STORED[name]]
    given.parameter.requires_grad_(False)
    given.parameter.grad = None
    loss, found = loss_and_gradients(model)
    assert loss == want
    assert found.keys() < gradients.keys()
    assert all(torch.equal(found[key], gradients[key]) for key in found)
    with torch.no_grad():
        assert model(input_ids=ids(), labels=ids()).loss.item() == want
    with torch.inference_mode():
        assert model(input_ids=ids(), labels=ids()).loss.item() == want
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])
def test_compiled_layers_compute_the_same(name):
    model = build(name)
    convert(model, "fp8_tile")
    want, gradients = loss_and_gradients(model)
    layers = model.transformer.h if name == "gpt2" else model.model.layers
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend="aot_eager")
    loss, found = loss_and_gradients(model)
    assert abs(loss - want) < 1e-3
    assert noise(found, gradients) < 0.1
    given = tile_weights(model)
    assert all(weight.matmuls.executed()["wgrad"] for weight in given.values())
