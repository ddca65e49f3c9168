"""What ranks exchange in a step: bytes against collectives that are counted in real steps, seconds, and speeds."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_tensor_hf import write_model
from tests.training.tiny import tiny
from tilewright.cli.app import run as command_line
from tilewright.core.hardware import detect_machine
from tilewright.parallel.communicate.wire_messages import row_bytes
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner import site
from tilewright.planner.cost.operations import total_s
from tilewright.planner.cost.rank_traffic import WIRE_SHARE, RankSpeed, RankTraffic
from tilewright.planner.cost.storage_links import rank_speed
from tilewright.planner.machine import ceilings
from tilewright.training.assemble import build, set_up

CASES = {
    "zero3": {},
    "zero2": {"parallel__reshard_after_forward": "false"},
    "accumulated": {"train__micro_batch_size": 1, "train__global_batch_size": 8},
    "reduced each": {"train__micro_batch_size": 1, "train__global_batch_size": 8, "parallel__reduce_each": "true"},
    "bf16": {"precision__mode": "bf16_mixed", "ops__linear": "native"},
}
WIRES = {name: {"parallel__grad_sync": name} for name in ("fp32", "bf16", "fp8")}
SPREAD = {"parallel__dp_shard": 2, "parallel__ep": 2, "train__micro_batch_size": 1}
ROUTED = SPREAD | {
    "model__num_experts": 4, "model__num_experts_per_token": 2, "model__expert_dim": 64, "model__dim": 128,
}  # fmt: skip
SPEEDS = {"gather": 1e9, "scatter": 1e9, "reduce": 1e9, "exchange": 2e9}
LEAST = 127
"""Bytes up to which a collective does not count: of losses and agreements."""


class Counted(TorchDispatchMode):
    """Bytes of the whole tensors that collectives of c10d make or take."""

    def __init__(self):
        super().__init__()
        self.found = dict.fromkeys(SPEEDS, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self._add("gather", args[0])
        elif name == "c10d::_reduce_scatter_base_":
            self._add("scatter", args[1])
        elif name == "c10d::allreduce_":
            self._add("reduce", *args[0])
        elif name == "c10d::alltoall_base_":
            self._add("exchange", args[1])
        return func(*args, **(kwargs or {}))

    def _add(self, kind, *tensors):
        size = sum(tensor.nbytes for tensor in tensors)
        self.found[kind] += size if size > LEAST else 0


def exchanged(rank, data, runs, cases):
    """For each case: bytes of a second step as counted and as planned."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    site.rank_speed = lambda machine, ranks, progress=None: RankSpeed(**SPEEDS)
    found = {}
    for name, changes in cases.items():
        loaded = tiny(Path(data), Path(runs), **changes)
        parallel = loaded.recipe.parallel
        with launched(MeshSizes.of(parallel), device="cpu", timeout_s=60) as world:
            setup = set_up(loaded, world=world)
            parts = build(setup, fresh=True)
            parts.modes.enter(0)
            parts.executor.step(parts.stream.next_step(), 1e-3)
            world.traffic.take()
            with Counted() as counted:
                parts.executor.step(parts.stream.next_step(), 1e-3)
            parts.close()
            sent = {}
            for (_, operation, wire), one in world.traffic.take().items():
                sent[operation, wire] = sent.get((operation, wire), 0) + one.sent_bytes
        plan = setup.plan
        found[name] = counted.found, vars(plan.traffic), sent, plan.to_json()["sent_bytes"], plan.seconds
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("replicate", "shards", "names"),
    [
        pytest.param(1, 2, ("zero2", "accumulated", "bf16"), marks=pytest.mark.slow),
        (2, 2, ("zero3", "reduced each")),
        (2, 1, ("zero3",)),
        pytest.param(1, 2, ("zero3", "reduced each"), marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_the_collectives_of_a_step(replicate, shards, names, data, tmp_path):
    mesh = {"parallel__dp_replicate": replicate, "parallel__dp_shard": shards}
    plain = {f"ops__{name}": "ref" for name in ("adam", "low_bit_adam", "rms_norm", "quantize")}
    cases = {name: {"train__micro_batch_size": 4} | CASES[name] | mesh | plain for name in names}
    for rank, results in enumerate(on_ranks(replicate * shards, exchanged, str(data), str(tmp_path), cases)):
        for name, (counted, planned, *_) in results.items():
            assert counted == pytest.approx(planned, rel=0.01), f"{name}, rank {rank}: {counted} counted"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("replicate", "shards", "wires"),
    [
        (1, 2, ("bf16", "fp8")),
        (2, 1, ("fp8",)),
        pytest.param(1, 2, ("fp32",), marks=pytest.mark.slow),
        pytest.param(2, 1, ("fp32", "bf16"), marks=pytest.mark.slow),
    ],
)
def test_a_plan_knows_the_format_of_gradients(replicate, shards, wires, data, tmp_path):
    mesh = {"parallel__dp_replicate": replicate, "parallel__dp_shard": shards}
    cases = {wire: {"train__micro_batch_size": 4, "model__dim": 128} | WIRES[wire] | mesh for wire in wires}
    operation = "reduce_scatter" if shards > 1 else "all_reduce"
    for results in on_ranks(2, exchanged, str(data), str(tmp_path), cases):
        for wire, (_, _, sent, planned, _) in results.items():
            # norms and ends of tensors are filled up to whole tiles in FP8
            assert sent[operation, wire] == pytest.approx(planned[operation], rel=0.02), wire
            if shards > 1:
                gathered = sum(size for (name, _), size in sent.items() if name == "all_gather")
                assert gathered == pytest.approx(planned["all_gather"], rel=0.01)


@pytest.mark.dist
def test_a_plan_knows_that_weights_travel_as_codes(data, tmp_path):
    mode = {"precision__mode": "fp8_tile", "model__dim": 128, "train__micro_batch_size": 4, "parallel__dp_shard": 2}
    cases = {gather: mode | {"parallel__param_gather": gather} for gather in ("as_read", "fp8")}
    for results in on_ranks(2, exchanged, str(data), str(tmp_path), cases):
        gathered = {}
        for gather, (_, _, sent, planned, _) in results.items():
            gathered[gather] = sum(size for (name, _), size in sent.items() if name == "all_gather")
            assert gathered[gather] == pytest.approx(planned["all_gather"], rel=0.01), gather
        assert gathered["fp8"] < 0.6 * gathered["as_read"], "embedding and head stay FP32"


@pytest.mark.dist
def test_a_plan_knows_rows_that_go_to_experts(data, tmp_path):
    """Of both ranks together there are as many as are planned, wherever the router sends them."""
    again, codes = {"train__activation_checkpoint": "full"}, {"parallel__dispatch": "fp8"}
    foreign = write_model(tmp_path, "qwen3_moe", hidden_size=128) | SPREAD | {"ops__cross_entropy": "native"}
    ways = {"again": ROUTED | again, "stacked, again": foreign | again | codes}
    copies = {"parallel__redundant_experts": 1, "parallel__place_experts": "on"}
    results = check_routed(data, tmp_path, ways, {"copies": ROUTED | again | copies})
    more = sum(found["copies"][0]["exchange"] - found["again"][0]["exchange"] for found in results)
    planned, alone = (results[0][name][1]["exchange"] for name in ("copies", "again"))
    assert more == planned - alone > 0, "gradients of two experts of each rank go to the other one"


@pytest.mark.slow
@pytest.mark.dist
def test_a_plan_knows_rows_that_go_to_experts_once(data, tmp_path):
    """Layers that keep what they computed; without codes."""
    foreign = write_model(tmp_path, "qwen3_moe", hidden_size=128) | SPREAD | {"ops__cross_entropy": "native"}
    mixed = {"precision__mode": "bf16_mixed", "ops__linear": "native"}
    ways = {"kept": ROUTED, "codes": ROUTED | {"parallel__dispatch": "fp8"}, "stacked": foreign | mixed}
    check_routed(data, tmp_path, ways)


def check_routed(data, tmp_path, ways, others=MappingProxyType({})):
    results = on_ranks(2, exchanged, str(data), str(tmp_path), {**ways, **others})
    for name in ways:
        ranks = [found[name] for found in results]
        _, planned, _, sent, seconds = ranks[0]
        assert sum(counted["exchange"] for counted, *_ in ranks) == 2 * planned["exchange"], name
        assert sent["all_to_all"] == planned["exchange"] / 2
        assert seconds["communication"] == pytest.approx(sum(planned[kind] / SPEEDS[kind] for kind in SPEEDS))
    return results


def test_bytes_of_formats_are_those_of_the_wire():
    for wire, share in WIRE_SHARE.items():
        assert row_bytes(1 << 20, wire) == share * row_bytes(1 << 20, "fp32")


def test_seconds_are_bytes_over_speeds():
    assert total_s(RankTraffic(8.0, 4.0, 2.0, 6.0).operations(RankSpeed(4.0, 1.0, 0.5, 3.0))) == 12.0
    assert RankTraffic(8.0, 4.0, 2.0, 6.0).total == 20.0


@pytest.mark.slow
@pytest.mark.dist
def test_a_speed_is_measured_once(tmp_path):
    """By default `bench comm` measures, and `tests/planner/test_measured_links.py` keeps what it finds."""
    said = []
    machine = detect_machine("cpu")
    first = rank_speed(machine, 2, tmp_path, progress=said.append)
    assert first is not None
    assert min(vars(first).values()) > 1e6
    assert rank_speed(machine, 2, tmp_path, progress=said.append) == first
    assert said == ["measuring what 2 processes exchange once"]
    assert rank_speed(machine, 1, tmp_path) is None


def test_a_plan_names_bytes_and_where_their_seconds_are_known(capsys):
    assert command_line(["plan", "zero_cpu", "--on", "h100", "--parallel.dp_shard", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["communication_bytes"] > 0
    assert "communication" not in found["seconds"]
    assert any("communication between ranks is not in the seconds" in note for note in found["notes"])
