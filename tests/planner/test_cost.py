"""Plans against real models, optimizers and runs, and against seconds computed by hand."""

import gc
import json
from dataclasses import replace

import pytest
import torch

from tests.cover import covering
from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tilewright.core.config.change_recipe import changed
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.memory.tracking.tensor_bytes import owner_bytes
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.build import build_model, init_weights
from tilewright.ops.base.code_modules import named_constants
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.param_groups import decay_groups
from tilewright.planner.advice.recipe_changes import to_fit
from tilewright.planner.cost.storage_links import unmeasured
from tilewright.planner.machine.process_bytes import GRAPH_BYTES
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.roofline import binding
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.model import build_adapted

MACHINE = make_machine()
MOE = {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 1, "tie_embeddings": False}
MLA = {"attention": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
       "v_head_dim": 16}  # fmt: skip


def plan_of(recipe, machine=MACHINE, vocab_size=512, **rates) -> Plan:
    return make_plan(recipe, vocab_size, machine, make_rates(**rates))


def changes_to_fit(recipe, vocab_size=512):
    budget = Budget(float(recipe.plan.device_memory), float("inf"), unmeasured(MACHINE), float("inf"))
    return to_fit(Planner(recipe, vocab_size, MACHINE, make_rates()), budget)


def real_model(recipe, vocab_size=512):
    model = build_model(recipe.model, vocab_size, Kernels(MACHINE), "cpu")
    init_weights(model, 0)
    model.activation_checkpoint = recipe.train.activation_checkpoint
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=Kernels(MACHINE))
    return model.train()


def make_batch(recipe, vocab_size=512):
    rows, length = recipe.train.micro_batch_size, recipe.data.seq_len
    ids = torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    half = torch.arange(length) % (length // 2)  # two documents a row
    positions = half.expand(rows, -1).contiguous()
    segments = (torch.arange(length) >= length // 2).int().expand(rows, -1).contiguous()
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions, "segments": segments}


@pytest.mark.parametrize("model", [{}, MOE, MLA, MLA | MOE], ids=["dense", "moe", "mla", "mla_moe"])
@pytest.mark.parametrize(
    ("precision", "optim"),
    [
        ({"mode": "fp32"}, {}),
        ({"mode": "bf16_mixed"}, {"moments": "bf16"}),
        ({"mode": "bf16_mixed"}, {"master_weights": "stochastic"}),
        ({"mode": "fp32"}, {"moments": "8bit"}),
        ({"mode": "bf16_mixed"}, {"moments": "8bit", "master_weights": "split24"}),
        ({"mode": "pure_fp16"}, {}),
        ({"mode": "fp8_tile"}, {}),
        ({"mode": "fp8_tensorwise"}, {}),
    ],
)
def test_held_bytes_equal_those_of_a_real_model_and_optimizer(model, precision, optim):
    recipe = make_recipe(model=model, precision=precision, optim=optim)
    built = real_model(recipe)
    optimizer = DeepSeekAdam(
        decay_groups(built, 0.1),
        moments=recipe.optim.moments,
        master=recipe.optim.master_weights,
        kernels=Kernels(MACHINE),
    )
    optimizer.init_states()
    QuantizedWeights(built, optimizer)
    owned = owner_bytes(built, optimizer, "cpu")
    update = plan_of(recipe).tracked["update"]
    counters = 8 * len(list(built.parameters()))
    assert update["parameters"] == owned["parameters"]
    assert update["optimizer"] == owned["optimizer"] - counters
    assert update["buffers"] == owned["buffers"]
    assert update["gradients"] == 4 * sum(p.numel() for p in built.parameters())


def test_adapters_alone_have_gradients_and_states():
    recipe = make_recipe(model={}, precision={"mode": "fp8_tile"}, lora={"rank": 4})
    built = build_adapted(recipe, 512, Kernels(MACHINE), "cpu", fresh=True)
    convert(built, Policy.from_section(recipe.precision, "cpu").in_mode("fp8_tile"), kernels=Kernels(MACHINE))
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    qdata = sum(b.nbytes for name, b in named_constants(built).items() if name.endswith(("weight", "weight_scale_inv")))
    update = plan_of(recipe).tracked["update"]
    assert 0 < trained < sum(p.numel() for p in built.parameters())
    assert update["parameters"] == owner_bytes(built, None, "cpu")["parameters"] + qdata
    assert (update["gradients"], update["optimizer"]) == (4 * trained, 8 * trained)


def measured_activations(recipe, vocab_size=512) -> int:
    """Live bytes that a second forward pass leaves."""
    gc.collect()  # garbage of other tests must not go while bytes are counted
    model, batch, memory_tracker = real_model(recipe, vocab_size), make_batch(recipe, vocab_size), MemoryTracker("cpu")
    QuantizedWeights(model, torch.optim.SGD(model.parameters()))
    for _ in range(2):
        with memory_tracker.phase("forward"):
            out = model.loss(batch)
        row = memory_tracker.snapshot(model, None)
        out.loss_sum.backward()
    return row["phase_owners"]["forward"]["activations"]


KINDS = {"dense": {}, "mla_moe": MLA | MOE}


@pytest.mark.parametrize(
    ("model", "checkpoint", "mode"),
    covering(
        tuple(KINDS),
        ("none", "selective", "matmuls", "attention", "full", "full_fp8"),
        ("fp32", "bf16_mixed", "hybrid", "fp8_tile"),
        pairs=False,
    ),
)
def test_activations_equal_those_of_a_real_forward_pass(model, mode, checkpoint):
    checkpoint, _, inputs = checkpoint.partition("_")
    recipe = make_recipe(
        model={"dim": 128, "num_layers": 3, "num_heads": 2} | KINDS[model],
        precision={"mode": mode},
        train={"micro_batch_size": 4, "activation_checkpoint": checkpoint, "checkpoint_inputs": inputs or "exact"},
    )
    planned, measured = plan_of(recipe).tracked["forward"]["activations"], measured_activations(recipe)
    assert planned == pytest.approx(measured, rel=0.05, abs=200_000), f"{planned / measured - 1:+.1%}"


@pytest.mark.parametrize(
    ("checkpoint", "kind"),
    [("none", "keep"), ("selective", "selective"), ("attention", "attention"), ("full", "recompute")],
)
def test_the_graph_of_an_eager_layer_counts_beside_its_tensors(checkpoint, kind):
    """On a CPU, where it is in the memory of the device; in FP32, where all tensors that are kept grow with tokens."""

    def kept(layers, tokens):
        train = {"activation_checkpoint": checkpoint}
        recipe = make_recipe(
            model={"num_layers": layers}, data={"seq_len": tokens}, train=train, precision={"mode": "fp32"}
        )
        return plan_of(recipe).tracked["forward"]["activations"]

    short, long = (kept(6, tokens) - kept(5, tokens) for tokens in (64, 128))
    assert 2 * short - long == pytest.approx(GRAPH_BYTES[kind], abs=4)


HF = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def hf_folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HF))
    return tmp_path


INPUTS_IN_8_BITS = {"activation_checkpoint": "full", "checkpoint_inputs": "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [{}, INPUTS_IN_8_BITS])
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "fp8_tile"])
def test_activations_of_a_foreign_model_are_traced(hf_folder, mode, checkpoint):
    recipe = make_recipe(
        model={"kind": "hf", "path": str(hf_folder)},
        precision={"mode": mode},
        train={"micro_batch_size": 4} | checkpoint,
    )
    planned, measured = plan_of(recipe).tracked["forward"]["activations"], measured_activations(recipe)
    assert planned == pytest.approx(measured, rel=0.06, abs=300_000), f"{planned / measured - 1:+.1%}"
    (layer,) = ShapeFinder(512, MACHINE).find(recipe).classes
    assert layer.matmul_flops == 2 * 128 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 320)
    assert layer.attention_flops == 4 * 128 * 128 * 128 / 2


def test_seconds_by_hand():
    recipe = make_recipe(precision={"mode": "fp32"}, train={"global_batch_size": 8, "micro_batch_size": 4})
    plan = plan_of(recipe)
    dim, ffn, layers, vocab, tokens, length = 64, 192, 3, 512, 4 * 128, 128
    layer = 4 * dim * dim + 3 * dim * ffn
    assert plan.seconds["matmuls"] == pytest.approx(2 * 6 * tokens * layers * layer / 1e12)
    assert plan.seconds["head"] == pytest.approx(2 * 6 * tokens * dim * vocab / 1e12)
    assert plan.seconds["loss"] == pytest.approx(2 * tokens * vocab / 1e9)
    attention = 4 * dim * (length + 1) / 2
    assert plan.seconds["attention"] == pytest.approx(2 * 3.5 * tokens * layers * attention / 1e11)
    num_parameters = layers * (layer + 2 * dim) + dim + vocab * dim
    assert plan.shape.num_parameters == num_parameters
    assert plan.seconds["optimizer"] == pytest.approx(num_parameters / 1e9 + 12 * num_parameters / 1e10)
    assert plan.tokens_per_s == pytest.approx(8 * 128 / plan.step_s)


def test_experts_count_by_the_share_of_tokens_that_pass_them():
    dense = plan_of(make_recipe(model={"ffn_dim": 64, "num_layers": 2}))
    experts = MOE | {"ffn_dim": 64, "num_layers": 2, "num_dense_layers": 0, "num_shared_experts": 0, "expert_dim": 32}
    sparse = plan_of(make_recipe(model=experts))
    router = 6 * 16 * 128 * 2 * 64 * 4 / 1e12
    padding = 0.125 * 6 * 16 * 128 * 2 * 3 * 64 * 64 / 1e12  # a CPU's rows of an expert are filled up
    assert sparse.seconds["matmuls"] - router - padding == pytest.approx(dense.seconds["matmuls"])


def test_recomputation_trades_seconds_for_bytes():
    modes = ("none", "selective", "matmuls", "attention", "full")
    plans = {mode: plan_of(make_recipe(train={"activation_checkpoint": mode})) for mode in modes}
    kept = [plans[mode].tracked["forward"]["activations"] for mode in modes]
    assert kept == sorted(kept, reverse=True)
    again = {mode: plans[mode].seconds["recompute"] for mode in modes}
    once = plans["none"].seconds
    loops = 0.39 * once["elementwise"] - 0.39 * element_s(11 * head_kept())
    matmuls = once["matmuls"] / 3 - 2 * 16 * 128 * 3 * 64 * 192 / 1e12  # not the last matmul of a layer
    attention = once["attention"] / 3.5
    assert again["none"] == 0
    assert again["selective"] == pytest.approx(loops)
    assert again["matmuls"] == pytest.approx(loops + attention)
    assert again["attention"] == pytest.approx(loops + matmuls)
    assert again["full"] == pytest.approx(loops + matmuls + attention)


def element_s(size: float) -> float:
    return size / 1e10


def head_kept() -> float:
    """Bytes that the head keeps of two micro-batches, and their gradient of its weight."""
    return 2 * (8 * 128 * (64 * (8 + 2) + 4) + 4 * 64 * 512)


def test_eight_bit_inputs_of_recomputed_layers_save_bytes_and_no_seconds():
    train = {"activation_checkpoint": "full"}
    exact, fp8 = (plan_of(make_recipe(train=train | {"checkpoint_inputs": kind})) for kind in ("exact", "fp8"))
    saved = exact.tracked["forward"]["activations"] - fp8.tracked["forward"]["activations"]
    assert saved == 3 * 8 * 128 * (2 * 64 - 64 - 4)
    assert exact.seconds["recompute"] == fp8.seconds["recompute"]


def test_seconds_of_8_bit_products_by_hand():
    """On a CPU they run at the BF16 rate, and operands are made and decoded at the speed of memory."""
    recipe = make_recipe(precision={"mode": "fp8_tile"}, train={"global_batch_size": 4, "micro_batch_size": 4})
    plan, plain = plan_of(recipe), plan_of(make_recipe(train={"global_batch_size": 4, "micro_batch_size": 4}))
    assert plan.seconds["matmuls"] == pytest.approx(plain.seconds["matmuls"])
    assert plain.seconds["quantize"] == 0
    dim, ffn, layers, tokens = 64, 192, 3, 4 * 128
    square, wide, read, copy, decode = dim * dim, dim * ffn, 2, 1, 3
    inputs = tokens * (2 * dim * (read + 2 * copy) + dim * (read + copy) + ffn * (read + 2 * copy))
    gradients = tokens * (4 * dim + 2 * ffn) * (read + 2 * copy)  # that of the output projection stays in BF16
    square_decodes = 3 * decode * 2 * (2 * tokens * dim + square)  # each of three operands is read twice
    wide_decodes = 3 * decode * 2 * (tokens * (dim + ffn) + wide)
    output_decodes = decode * (tokens * dim + square)
    weights = 5 * (4 * square + 3 * wide)
    total = layers * (inputs + gradients + square_decodes + wide_decodes + output_decodes + weights)
    assert plan.seconds["quantize"] == pytest.approx(total / 1e10)


def test_a_unit_for_8_bits_runs_at_its_own_rate():
    model = {"dim": 4096, "num_layers": 2, "num_heads": 32}
    recipe, plain = (
        make_recipe(model=model, precision={"mode": mode, "bf16_grad_layers": []}, train={"micro_batch_size": 1})
        for mode in ("fp8_tile", "bf16_mixed")
    )
    rates = make_rates().matmul | {"fp8": {256: 4e12, 2048: 4e12}}
    machine = make_machine(80 * GIB, "cuda")
    fast = plan_of(recipe, machine, matmul=rates).seconds
    assert fast["matmuls"] == pytest.approx(plan_of(plain, machine, matmul=rates).seconds["matmuls"] / 4)
    old = replace(machine, capability=(8, 0))
    slow = plan_of(recipe, old).seconds
    assert slow["matmuls"] == pytest.approx(4 * fast["matmuls"])
    assert slow["quantize"] > fast["quantize"] > 0


def test_start_mode_counts_for_bytes():
    both = plan_of(make_recipe(precision={"mode": "bf16_mixed", "start_mode": "fp32"}))
    late = plan_of(make_recipe(precision={"mode": "bf16_mixed"}))
    early = plan_of(make_recipe(precision={"mode": "fp32"}))
    assert both.tracked["forward"]["activations"] == early.tracked["forward"]["activations"]
    assert both.seconds["matmuls"] == late.seconds["matmuls"]


def test_staging_copy_counts_where_training_goes_on():
    quiet = plan_of(make_recipe(checkpoint={"interval": 0, "interval_minutes": 0}))
    busy = plan_of(make_recipe(checkpoint={"interval": 100}, train={"steps": 400}))
    copy = busy.tracked["update"]["parameters"] + busy.tracked["update"]["optimizer"]
    assert (
        busy.tracked_bytes("checkpoint")
        == max(busy.tracked_bytes(p) for p in (*STEP_PHASES, "evaluate") if p in busy.tracked) + copy
    )
    assert quiet.tracked_bytes("checkpoint") == quiet.tracked_bytes("update")  # the last one is written without a copy


def test_a_run_that_fits_says_so():
    plan = plan_of(make_recipe())
    assert plan.state == "fits"
    assert plan.verdict.startswith("The run fits: ")
    assert "; no memory is scarce, most time goes to " in plan.verdict


def test_a_run_that_takes_nearly_all_memory_says_so():
    peak = plan_of(make_recipe()).peak_bytes
    plan = plan_of(make_recipe(plan={"device_memory": int(peak * 1.001), "margin": 0.0}))
    assert plan.state == "fits"
    assert "; device memory is scarce, most time goes to " in plan.verdict


BIG = {"model": {"dim": 512, "num_layers": 12, "num_heads": 8}, "data": {"seq_len": 512, "vocab_size": 16384},
       "train": {"micro_batch_size": 16}, "checkpoint": {"interval": 0}}  # fmt: skip


def test_fixes_fit_when_planned_again_and_come_cheapest_first():
    recipe = make_recipe(**BIG, plan={"device_memory": 2 * GIB})
    plan, fixes = plan_of(recipe, vocab_size=16384), changes_to_fit(recipe, 16384)
    assert plan.state != "fits"
    assert plan.verdict.startswith("The run does not fit: ")
    assert 1 <= len(fixes) <= 3
    for fix in fixes:
        again = plan_of(changed(recipe, fix.settings), vocab_size=fix.settings.get("data.vocab_size", 16384))
        assert again.state == "fits"
        assert again.peak_bytes == pytest.approx(fix.plan.peak_bytes, abs=10)
        assert again.step_s == pytest.approx(fix.plan.step_s)
    order = [(not fix.keeps_result, 1 / fix.plan.tokens_per_s) for fix in fixes]
    assert order == sorted(order)


def test_where_nothing_fits_the_closest_are_named():
    fixes = changes_to_fit(make_recipe(**BIG, plan={"device_memory": 2**20}), 16384)
    assert len(fixes) == 3
    assert not any(fix.fits for fix in fixes)
    assert "still too much" in str(fixes[0])


def test_json_round_trip():
    for plan in (plan_of(make_recipe()), plan_of(make_recipe(plan={"device_memory": 2**20}))):
        text = json.dumps(plan.to_json())
        assert json.loads(text) == plan.to_json()
        assert json.loads(text)["tokens_per_s"] == plan.tokens_per_s


def test_binding_ceiling_is_that_of_most_seconds():
    assert binding({"matmuls": 1.0, "head": 1.0, "optimizer": 1.9, "loss": 0.0}) == ("compute", "matmuls")
    assert binding({"matmuls": 1.0, "head": 0.5, "optimizer": 0.6, "loss": 1.0}) == ("bandwidth", "loss")


def test_forty_two_billion_parameters_are_planned_without_memory():
    dim, layers, heads, kv_heads, ffn, vocab = 7680, 66, 60, 12, 20480, 128_256
    model = {"dim": dim, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": ffn}
    recipe = make_recipe(
        model=model | {"tie_embeddings": False},
        data={"seq_len": 8192},
        train={"micro_batch_size": 1, "global_batch_size": 1},
    )
    plan = plan_of(recipe, make_machine(139 * GIB, "cuda"), vocab_size=vocab)
    attention = dim * 128 * (2 * heads + 2 * kv_heads)
    assert plan.shape.num_parameters == layers * (attention + 3 * dim * ffn + 2 * dim) + dim + 2 * vocab * dim
    assert plan.shape.num_parameters > 42e9
    assert plan.tracked["load"]["parameters"] == 4 * plan.shape.num_parameters
    assert plan.state != "fits"
    assert any("no CUDA device" in note for note in plan.notes)
