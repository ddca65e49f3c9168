"""What a plan says of the ranks of a run: parts of parameters, gradients and states against tensors that are cut, rows
of a step, what is put together, budgets."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.observe import fixed_ceilings
from tests.cover import covering
from tests.planner.rates import GIB, make_machine, make_rates, make_recipe
from tests.planner.test_cost import MLA, MOE
from tilewright.cli.app import run as command_line
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import LayerMemory
from tilewright.models.build import build_model
from tilewright.ops.kernels import Kernels
from tilewright.parallel.inside.experts.placement import by_rank, usual
from tilewright.parallel.inside.tensor.matrix_cuts import cut_dims
from tilewright.planner.cost.layer_choices import GlobalConfig, Links, state_bytes
from tilewright.planner.cost.rank_share import PRICED, UNPRICED, Gathered, Shards
from tilewright.planner.cost.storage_links import unmeasured
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.part_weights import part_shape
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.optimizer import make_optimizer

CPU, GPU = make_machine(), make_machine(device="cuda")
ALONE = {"global_batch_size": 4, "micro_batch_size": 4}
"""One of four ranks' share of a step."""
MODELS = {"dense": {"num_kv_heads": 1}, "untied": {"tie_embeddings": False}, "moe": MOE, "mla": MLA | MOE}
OPTIM = {
    "adamw": {},
    "8bit": {"moments": "8bit"},
    "split24": {"moments": "8bit", "master_weights": "split24"},
    "muon": {"kind": "muon"},
    "muon 8bit": {"kind": "muon", "moments": "8bit"},
}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 9))
def test_parts_are_those_of_chunk(shape, shards):
    """As torch cuts a tensor along its first dim; ranks behind the last chunk have no rows."""
    chunks = [tuple(chunk.shape) for chunk in torch.chunk(torch.empty(shape), shards)]
    chunks += [(0, *shape[1:])] * (shards - len(chunks))
    assert [part_shape(tuple(shape), shards, rank) for rank in range(shards)] == chunks


def held(recipe, vocab_size, shards, rank):
    """(parameters, gradients, states) bytes of the parts of a model that is cut parameter by parameter, as the
    optimizer lays states out. Of experts on `ep` ranks those of this one, redundant ones too, each in parts over the
    ranks that have the same ones."""
    model = build_model(recipe.model, vocab_size, device="meta")
    parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=Kernels.default())
    optimizer = make_optimizer(recipe.optim, model, Kernels.default(), 0)
    found, ep, names = [0, 0, 0], recipe.parallel.ep, {param: name for name, param in model.named_parameters()}
    experts = by_rank(usual(recipe.model.num_experts, ep, recipe.parallel.redundant_experts), ep)[rank % ep]
    for group in optimizer.param_groups:
        for param in group["params"]:
            _, _, expert = names[param].partition(".experts.")
            if expert and int(expert.partition(".")[0]) not in experts:
                continue
            parts, number = (shards // ep, rank // ep) if expert else (shards, rank)
            rows = [len(chunk) for chunk in torch.chunk(torch.empty(len(param)), parts)] + [0] * parts
            share = rows[number] / len(param)  # of every state too: all have the parameter's rows
            found[0] += param.nbytes * share
            found[1] += 4 * param.numel() * share
            layout = optimizer.state_layout(param).values()
            found[2] += sum(shape.numel() * dtype.itemsize for shape, dtype in layout) * share
    return found


@pytest.mark.parametrize(("model", "optim", "shards"), covering(tuple(MODELS), tuple(OPTIM), (4, 7)))
def test_a_rank_holds_what_its_parts_have(model, optim, shards):
    recipe = make_recipe(model=MODELS[model], optim=OPTIM[optim], parallel={"dp_shard": shards})
    weights, setting = ShapeFinder(509, CPU).find(recipe).weights, GlobalConfig.of(recipe)
    for rank in {0, 1, shards - 1}:
        part, wanted = weights.part(shards, rank), held(recipe, 509, shards, rank)
        found = [part.stored, 4.0 * part.trained, state_bytes(part, setting)]
        assert found == pytest.approx(wanted, rel=1e-12), f"rank {rank}: {found} planned, {wanted} held"


SPREAD = (4, 4, 0), (4, 2, 0), (6, 2, 0), (4, 2, 1), (4, 4, 3)
"""Ranks, those that hold other experts, and redundant ones of each."""


@pytest.mark.parametrize(("optim", "sizes"), covering(tuple(OPTIM), SPREAD, pairs=False))
def test_a_rank_holds_its_experts(optim, sizes):
    shards, ep, redundant = sizes
    model = MOE | {"num_experts": 8}
    parallel = {"dp_shard": shards, "ep": ep, "redundant_experts": redundant, "place_experts": "on"}
    recipe = make_recipe(model=model, optim=OPTIM[optim], parallel=parallel)
    weights, setting = ShapeFinder(509, CPU).find(recipe).weights, GlobalConfig.of(recipe)
    for rank in range(shards):
        part, wanted = weights.part(shards, rank), held(recipe, 509, shards, rank)
        found = [part.stored, 4.0 * part.trained, state_bytes(part, setting)]
        assert found == pytest.approx(wanted, rel=1e-12), f"rank {rank}: {found} planned, {wanted} held"


@pytest.mark.parametrize(("shards", "ep", "mode"), [(4, 4, "bf16_mixed"), (4, 2, "bf16_mixed"), (4, 4, "fp32")])
def test_casts_are_kept_of_experts_that_no_other_rank_has(shards, ep, mode):
    model = MOE | {"num_experts": 8, "num_shared_experts": 0}
    recipe = make_recipe(model=model, parallel={"dp_shard": shards, "ep": ep}, precision={"mode": mode})
    decoder = build_model(recipe.model, 509, device="meta")
    experts = sum(
        param.numel() for name, param in decoder.named_parameters() if ".experts." in name and name.endswith("weight")
    )
    kept = 2 * experts // ep if ep == shards and mode == "bf16_mixed" else 0
    machine = replace(CPU, cpu_features=frozenset(["avx512_bf16"]))
    assert ShapeFinder(509, machine).find(recipe).weights.tensors.cast(shards) == kept


@pytest.mark.parametrize(("tp", "shards"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("vocab", [509, 512])
@pytest.mark.parametrize("model", [{"tie_embeddings": False, "num_heads": 4}, MLA | {"num_heads": 8}])
def test_a_rank_holds_its_parts_of_cut_matrices(model, vocab, tp, shards):
    """Against what the cuts leave of each tensor. FP32 parameters, gradients and moments."""
    recipe = make_recipe(model=model, parallel={"dp_shard": shards, "tp": tp})
    weights, setting = ShapeFinder(vocab, CPU).find(recipe).weights, GlobalConfig.of(recipe)
    whole = build_model(recipe.model, vocab, device="meta")
    dims = {module.weight: dim for module, dim in cut_dims(whole, tp, shards).items()}
    for rank in range(shards):
        wanted = 0
        for param in whole.parameters():
            sizes = [size // (tp if dim == dims.get(param) else 1) for dim, size in enumerate(param.shape)]
            wanted += prod(part_shape(tuple(sizes), shards, rank))
        part = weights.part(shards, rank)
        assert [part.stored, part.trained, state_bytes(part, setting)] == [4 * wanted, wanted, 8 * wanted]


@pytest.mark.parametrize(("tp", "shards", "ep"), [(2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 1, 1), (2, 1, 2)])
def test_experts_are_in_parts_over_ranks_of_cut_matrices_too(tp, shards, ep):
    model = MOE | {"num_experts": 8, "num_heads": 4, "num_kv_heads": 4, "num_shared_experts": 1}
    recipe = make_recipe(model=model, parallel={"dp_shard": shards, "tp": tp, "ep": ep})
    weights, setting = ShapeFinder(512, CPU).find(recipe).weights, GlobalConfig.of(recipe)
    whole = build_model(recipe.model, 512, device="meta")
    dims = {module.weight: dim for module, dim in cut_dims(whole, tp, shards).items()}
    wanted = 0
    for name, param in whole.named_parameters():
        _, _, expert = name.partition(".experts.")
        if expert:
            here = int(expert.partition(".")[0]) < recipe.model.num_experts // ep
            wanted += here * prod(part_shape(tuple(param.shape), shards * tp // ep))
        else:
            sizes = [size // (tp if dim == dims.get(param) else 1) for dim, size in enumerate(param.shape)]
            wanted += prod(part_shape(tuple(sizes), shards))
    part = weights.part(shards)
    assert [part.stored, part.trained, state_bytes(part, setting)] == [4 * wanted, wanted, 8 * wanted]
    assert setting.shards.cut, "experts are put together where nothing else is"


def test_a_plan_says_that_matrices_are_cut():
    plan = plan_of(parallel={"dp_shard": 2, "tp": 2})
    shards = plan.setting.shards
    assert shards.words() == "4 ranks: 2 shards, matrices in 2 parts"
    assert plan.setting.num_micro * plan.recipe.train.micro_batch_size == 8, "rows of a step over the two shards"
    for words, measured in ((UNPRICED, False), (PRICED, True)):
        assert words in shards.notes(True, measured)
        assert words in plan_of(parallel={"dp_shard": 1, "tp": 2}).setting.shards.notes(True, measured)
    assert plan.peak_bytes < plan_of(parallel={"dp_shard": 2}).peak_bytes


def test_a_layer_is_gathered_without_the_experts_of_other_ranks():
    found = {}
    for ep in (1, 4):
        recipe = make_recipe(model=MOE | {"num_experts": 8}, parallel={"dp_shard": 4, "ep": ep})
        shape = ShapeFinder(509, CPU).find(recipe)
        mixture = next(each for each in shape.classes if each.routes).weights.tensors
        found[ep] = mixture.gathered(4, wide=True), mixture.gradients(4)
    model = build_model(recipe.model, 509, device="meta")
    experts = [param for name, param in model.model.layers[-1].named_parameters() if ".experts." in name]
    rest = [param for name, param in model.model.layers[-1].named_parameters() if ".experts." not in name]
    padded = 4 * sum(4 * prod(part_shape(tuple(param.shape), 4)) for param in rest)
    assert found[4][0] == padded + sum(4 * param.numel() for param in experts) // 4, "its own experts, whole"
    assert found[1][0] == padded + sum(16 * prod(part_shape(tuple(param.shape), 4)) for param in experts)
    assert found[4] == (found[4][0], found[4][0]), "gradients in FP32 as parameters"


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
def test_a_recomputed_layer_keeps_where_its_tokens_went(mode):
    """Where its experts are on several ranks: 8 bytes for each expert that a token chose, as
    `tests/models/test_activation_bytes.py` measures them."""
    bytes_ = {}
    for ep in (1, 2):
        parallel, train = {"dp_shard": 2, "ep": ep}, {"compile": "off", "activation_checkpoint": mode}
        shape = ShapeFinder(509, CPU).find(make_recipe(model=MOE, parallel=parallel, train=train))
        mixture = next(each for each in shape.classes if each.routes)
        kept = {"full": mixture.input, "selective": mixture.kept_selective, "attention": mixture.kept_attention}
        bytes_[ep] = kept[mode](3)
    recipe = make_recipe(model=MOE)
    assert bytes_[2] - bytes_[1] == 8 * recipe.model.num_experts_per_token * 3 * recipe.data.seq_len


def plan_of(machine=CPU, **sections):
    recipe = make_recipe(**{"train": {"global_batch_size": 16, "micro_batch_size": 4}} | sections)
    budget = Budget(1e12, 1e12, unmeasured(machine))
    return Planner(recipe, 509, machine, make_rates()).as_it_stands(budget)


def gathered_of(plan):
    """Bytes of the parameters of the rest of the model and of one layer, each filled up to equal parts, by hand."""
    model = build_model(plan.recipe.model, 509, device="meta")
    shards = plan.setting.shards.count
    filled = {
        name: shards * -(-len(p) // shards) * prod(p.shape[1:]) * p.itemsize for name, p in model.named_parameters()
    }
    layer = sum(size for name, size in filled.items() if ".layers.0." in name)
    return sum(size for name, size in filled.items() if ".layers." not in name), layer


def test_what_is_put_together_and_when():
    """Three layers of 4 shards, FP32 parameters: ZeRO-3, ZeRO-2, whole gradients between micro-batches."""
    zero3 = plan_of(parallel={"dp_shard": 4})
    zero2 = plan_of(parallel={"dp_shard": 4, "reshard_after_forward": False})
    rest, layer = gathered_of(zero3)
    part = zero3.shape.weights.part(4)
    assert zero3.setting.num_micro == 1
    for plan, layers in ((zero3, 0), (zero2, 3)):
        assert plan.phases["backward"]["parameters"] == part.stored + rest + layers * layer
        assert plan.phases["update"]["parameters"] == part.stored
        assert plan.phases["update"]["gradients"] == 4 * part.trained
    together = Gathered(zero3.shape, zero3.setting.shards, 1)
    assert (together.rest, together.largest) == (rest, layer)
    row = next(row for row in zero3.rows if row.indices)
    whole = plan_of()
    alone = next(one for one in whole.rows if one.indices)
    assert row.cost.forward - alone.cost.forward == 2 * layer
    assert row.cost.backward - alone.cost.backward == pytest.approx(4 * layer)  # gradients have the same bytes in FP32
    several = {"global_batch_size": 32, "micro_batch_size": 4}
    summed = plan_of(parallel={"dp_shard": 4}, train=several)
    each = plan_of(parallel={"dp_shard": 4, "reduce_each": True}, train=several)
    assert summed.setting.num_micro == each.setting.num_micro == 2
    assert summed.phases["forward"]["gradients"] == 4 * summed.shape.weights.trained
    assert each.phases["forward"]["gradients"] == 4 * part.trained


@pytest.mark.parametrize(("copies", "shards"), [(1, 4), (4, 1), (2, 2)])
def test_rows_and_seconds_are_those_of_a_rank(copies, shards):
    plan, alone = plan_of(parallel={"dp_replicate": copies, "dp_shard": shards}), plan_of(train=ALONE)
    assert (plan.setting.num_micro, plan.setting.micro_batch_size) == (1, 4)
    assert plan.seconds["matmuls"] == pytest.approx(alone.seconds["matmuls"])
    assert plan.seconds["optimizer"] == pytest.approx(alone.seconds["optimizer"] / shards, rel=0.02)
    assert plan.tokens_per_step == 16 * 128
    assert any("communication" in note for note in plan.notes)
    assert "of each of 4 ranks" in plan.verdict


def test_a_pair_of_answers_stays_on_one_rank():
    recipe = make_recipe(data={"format": "preferences"}, train={"global_batch_size": 10, "micro_batch_size": 4})
    assert Shards(ranks=4).rows(recipe) == 4
    assert Shards(ranks=1).rows(recipe) == 10


def test_copies_hold_the_whole_model():
    assert plan_of(parallel={"dp_replicate": 4}).phases == plan_of(train=ALONE).phases


def test_uneven_parts_by_rank():
    """509 words over 4 ranks: the last has fewer gradients and states; its parameters are filled up."""
    rows = plan_of(parallel={"dp_shard": 4, "dp_replicate": 2}).ranks
    assert [row.ranks for row in rows] == [(0, 1, 2, 4, 5, 6), (3, 7)]
    assert rows[0].parameters == rows[1].parameters
    assert rows[0].gradients - rows[1].gradients == 4 * 3 * 64
    assert rows[0].optimizer - rows[1].optimizer == 8 * 3 * 64


def test_parts_on_the_host():
    here, away = (plan_of(GPU, parallel={"dp_shard": 4, "cpu_offload": offload}) for offload in (False, True))
    part = here.shape.weights.part(4)
    states = state_bytes(part, here.setting)
    assert away.host["parameters"] + away.host["optimizer"] + away.host["gradients"] == pytest.approx(
        part.stored + states + 4 * part.trained
    )
    assert here.phases["update"]["parameters"] - away.phases["update"]["parameters"] == part.stored
    assert away.phases["update"]["gradients"] == away.phases["update"]["optimizer"] == 0
    assert away.phases["backward"]["parameters"] > 0  # what is put together is on the device
    assert any("cpu_offload" in note for note in away.notes)
    on_cpu = plan_of(parallel={"dp_shard": 4, "cpu_offload": True})
    assert on_cpu.phases == plan_of(parallel={"dp_shard": 4}).phases  # the host is the device


def test_a_plan_within_a_budget_on_shards():
    """Layers keep less until a rank's share fits; the layer-major executor, which does not shard, is left out."""
    recipe = make_recipe(
        model={"num_layers": 8}, data={"seq_len": 512}, parallel={"dp_shard": 2},
        train={"global_batch_size": 16, "micro_batch_size": 8}, plan={"margin": 0.0},
    )  # fmt: skip
    formats, fixed = frozenset(("optim.moments",)), Constraints(micro_batch_size=8)
    planner = Planner(recipe, 509, CPU, make_rates(), formats, fixed=fixed)
    links = Links(None, None)
    whole = planner.as_it_stands(Budget(1e12, 1e12, links))
    least = planner.smallest(Budget(1e12, 1e12, links))
    budget = Budget((whole.peak_bytes + least.peak_bytes) / 2, 1e12, links)
    found = planner.plan(budget)
    assert found.setting.executor == "standard"
    assert found.peak_bytes <= budget.device < whole.peak_bytes
    assert found.memory_plan.layers != (LayerMemory(),) * 8
    assert planner.plan(replace(budget, device=0.99 * least.least_device)) is None


def test_fp8_codes_are_not_kept_of_parts():
    sections = {"precision": {"mode": "fp8_tile"}, "model": {"dim": 128}}
    whole, cut = plan_of(**sections), plan_of(**sections, parallel={"dp_shard": 2})
    assert whole.phases["forward"]["buffers"] > 0
    assert cut.phases["forward"]["buffers"] == 0
    assert cut.seconds["quantize"] * 2 > whole.seconds["quantize"]  # half as many rows, weights in each pass


# ---- the command ----


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
    rates = {"gather": 1e9, "scatter": 1e9, "reduce": 1e9, "exchange": 1e9}
    monkeypatch.setattr("tilewright.planner.machine.rank_link.measure", lambda ranks, progress=None: rates)


def planned(capsys, *typed):
    code = command_line(["plan", "zero_cpu", "--json", *typed])
    return code, json.loads(capsys.readouterr().out)


def test_cards_are_planned_without_torchrun(capsys):
    code, found = planned(capsys, "--on", "h100", "--parallel.dp_shard", "8", "--host-memory", "512GiB")
    assert code == 0
    assert found["host_budget"] == 64 * GIB  # of one rank
    assert found["device_budget"] > 60 * GIB
    assert [row["ranks"] for row in found["ranks"]] == [list(range(8))]
    _, alone = planned(capsys, "--on", "h100", "--host-memory", "512GiB")
    assert alone["host_budget"] == 512 * GIB
    assert found["ranks"][0]["optimizer"] == pytest.approx(alone["ranks"][0]["optimizer"] / 8, rel=0.01)


def test_ranks_on_this_machine_share_its_memory(capsys):
    _, alone = planned(capsys)
    code, found = planned(capsys, "--parallel.dp_shard", "2", "--parallel.dp_replicate", "2")
    assert code == 0
    assert found["device_budget"] == alone["device_budget"] // 4
    assert found["ranks"][0]["ranks"] == [0, 1, 2, 3]
    assert any("share its cores and memory" in note for note in found["notes"])


def test_a_rank_that_does_not_fit_is_an_error(capsys):
    small = ["plan", "zero_cpu", "--parallel.dp_shard", "4", "--plan.device_memory", "64MiB"]
    assert command_line(small) == 3
    assert "64.00 MiB on the device of each of 4 ranks" in capsys.readouterr().err
    assert command_line([*small, "--memory.plan", ""]) == 3  # as it stands
    shown = capsys.readouterr()
    assert "of 64.00 MiB on the device of each of 4 ranks" in shown.err
    assert "0-3" in shown.out
    for part in ("got", "need", "try"):
        assert f"\n  {part} " in shown.err


def test_a_share_is_not_the_whole_machine(capsys):
    size = f"{memory_here() // 2}B"
    code = command_line(["plan", "zero_cpu", "--parallel.dp_shard", "4", "--device-memory", size])
    assert code == 2
    assert "each of 4 ranks on this machine has" in capsys.readouterr().err


def test_more_ranks_than_samples_are_no_plan(capsys):
    assert command_line(["plan", "zero_cpu", "--parallel.dp_shard", "64"]) == 2
    said = capsys.readouterr().err
    assert "Fewer samples per step than processes" in said
    assert "--train.global_batch_size 64" in said


def test_as_many_shards_as_there_are_processes_is_no_number(capsys):
    """Typed, it is a mistake; in a recipe it is said that the plan is of one process."""
    assert command_line(["plan", "zero_cpu", "--parallel.dp_shard", "-1"]) == 2
    said = capsys.readouterr().err
    assert "Number of processes is not known to a plan" in said
    assert "--parallel.dp_shard 4" in said
    _, found = planned(capsys)
    (note,) = [note for note in found["notes"] if "torchrun" in note]
    assert "the plan of one process" in note
    assert "--parallel.dp_shard N" in note
    _, found = planned(capsys, "--parallel.dp_shard", "2")
    assert not any("torchrun" in note for note in found["notes"])
    assert command_line(["plan", "default", "--json"]) == 0
    assert "torchrun" not in capsys.readouterr().out


def memory_here():
    return detect_machine("cpu").device_memory_bytes
