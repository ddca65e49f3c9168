"""Each layer as its memory plan says: whatever that is, losses and weights are the same bits.

The reference is the same executor with everything on the device and recomputed, which `test_layer_major_step` compares
with torch's AdamW.
"""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cover import covering
from tests.models.shapes import make_decoder
from tests.models.test_activation_bytes import AliveStorages
from tests.models.test_hf_models import make as make_hf
from tests.training.test_layer_major_hf import steps as hf_steps
from tests.training.test_layer_major_hf import without_dropout
from tests.training.test_layer_major_step import Dropped, steps
from tests.training.test_placing import saved_bytes
from tests.training.tiny import tiny, write_text
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.memory.layer_major.apply_plan import by_group, input_tiers
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.build import layered
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.training import assemble
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors
from tilewright.training.executor.layer_major import LayerMajorExecutor

TIERS = ("device", "host", "disk")
LR = 1e-3


def layer_major(model, memory_plan, folder, *, group=1, delayed=False, qdata=False):
    """An executor whose slices and inputs are where the memory plan says."""
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), betas=(0.9, 0.95))
    view = layered(model)
    layer_groups = find_layer_groups(model, view, group)
    wanted = by_group(memory_plan, layer_groups)
    homes = [{name: getattr(layer, kind) for name, layer in wanted.items()} for kind in ("parameters", "states")]
    offloader = ParamOffloader(
        model, layer_groups, optimizer, "cpu", parameters=homes[0], states=homes[1], folder=folder
    )
    weights = None
    if qdata:
        away = [m for part in layer_groups for m in part.modules if offloader.homes(part)[0] != "device"]
        weights = QuantizedWeights(model, optimizer, without=away)
    return LayerMajorExecutor(
        model, view, layer_groups, optimizer, clip=GradClip(0.5), delayed=delayed,
        rollback_buffer=RollbackBuffer("host", "cpu") if delayed else None, offloader=offloader, weights=weights,
        inputs=ActivationStore(input_tiers(memory_plan, layer_groups), "cpu", folder=folder), memory_plan=memory_plan,
    )  # fmt: skip


def drawn(draw, num_layers=2, group=1):
    """A memory plan at random, the same for the layers of a slice."""
    ends = [LayerMemory(parameters=draw.choice(TIERS), states=draw.choice(TIERS), inputs=draw.choice(TIERS))
            for _ in range(2)]  # fmt: skip
    layers = []
    for _ in range(0, num_layers, group):
        layer = LayerMemory(
            parameters=draw.choice(TIERS), states=draw.choice(TIERS), inputs=draw.choice(TIERS),
            activations=draw.choice(["keep", "recompute"]),
        )  # fmt: skip
        layers += [layer] * group
    return MemoryPlan(layers=tuple(layers[:num_layers]), embedding=ends[0], head=ends[1])


def plain(num_layers=2):
    return MemoryPlan.uniform(num_layers, activations="recompute")


def outcome(executor, made, changes=()):
    """Loss and norm of each step, and every parameter and state at the end, by name."""
    results = []
    for number, microbatches in enumerate(made):
        if number < len(changes):
            executor.apply_memory_plan(changes[number])
            assert executor.memory_plan == changes[number]
        result = executor.step(microbatches, LR)
        assert result.skipped is None
        results.append((result.loss, result.grad_norm))
    home, found = executor.run.offloader, {}
    for part in executor.run.layer_groups:
        found |= home.parameters.read(part.name) | home.states.read(part.name)
    executor.close()
    return results, found


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, tensor in one[1].items() if not torch.equal(tensor, other[1][name])] == []


@pytest.mark.parametrize(
    ("of", "delayed"),
    covering([("gqa", 1), ("tied", 1), ("gqa", 2), ("gqa_moe", 1), ("deepseek", 1)], (False, True), pairs=False),
)
def test_random_placements_change_no_number(of, delayed, tmp_path):
    """Dense and with experts, one pass and two, dropout, slices of one layer and of two."""
    (name, group), made, want = of, steps(3), None
    for seed in range(4):
        model = make_decoder(name).train()
        for block in model.blocks:
            block.self_attn.o_proj = Dropped(block.self_attn.o_proj)
        memory_plan = drawn(random.Random(seed), group=group) if seed else plain()
        executor = layer_major(model, memory_plan, tmp_path, group=group, delayed=delayed)
        assert executor.memory_plan.layers == memory_plan.layers
        torch.manual_seed(5)
        got = outcome(executor, made), torch.get_rng_state()
        want = want or got
        assert_same(got[0], want[0])
        assert torch.equal(got[1], want[1]), "generators are where they were"
    assert len(set(want[0][0])) == 3, "it learned"


@pytest.mark.parametrize(("name", "delayed"), covering(("gqa", "tied", "gqa_moe"), (False, True), pairs=False))
def test_a_change_between_steps_changes_no_number(name, delayed, tmp_path):
    """A new memory plan, drawn at random, before each step."""
    made = steps(5)
    want = outcome(layer_major(make_decoder(name).train(), plain(), tmp_path, delayed=delayed), made)
    draw = random.Random(name)
    changes = [drawn(draw) for _ in made]
    got = outcome(layer_major(make_decoder(name).train(), drawn(draw), tmp_path, delayed=delayed), made, changes)
    assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
def test_precision_modes(mode, tmp_path):
    """Copies of weights in 16 or 8 bits are made from the weights of the moment, and follow them home."""
    made, want = steps(4), None
    for seed in range(3):
        model = make_decoder("gqa").train()
        convert(model, mode)
        draw = random.Random(seed)
        executor = layer_major(model, drawn(draw) if seed else plain(), tmp_path, qdata=mode == "fp8_tile")
        got = outcome(executor, made, [drawn(draw) for _ in made] if seed else [])
        want = want or got
        assert_same(got, want)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "mixtral"])
def test_hugging_face_models(name, tmp_path):
    want = None
    for seed in range(3):
        model = without_dropout(make_hf(name))
        made = hf_steps(model, 3)
        draw = random.Random(seed)
        executor = layer_major(model, drawn(draw) if seed else plain(), tmp_path, delayed=seed == 2)
        if seed == 2:  # one pass: compared with itself alone
            want = outcome(layer_major(without_dropout(make_hf(name)), plain(), tmp_path, delayed=True), made)
        got = outcome(executor, made, [drawn(draw) for _ in made] if seed else [])
        want = want or got
        assert_same(got, want)


def test_a_kept_layer_is_not_computed_again(tmp_path):
    """Calls of each layer in a step of four micro-batches: forward, and where it is recomputed once a backward pass."""
    calls = {}
    for delayed in (False, True):
        model = make_decoder("gqa").train()
        layers = (LayerMemory(activations="recompute"), LayerMemory(activations="keep"))
        executor = layer_major(model, MemoryPlan(layers=layers), tmp_path, delayed=delayed)
        calls[delayed] = [0, 0]
        for index, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=index, told=calls[delayed]: told.__setitem__(i, told[i] + 1))
        executor.step(steps(1)[0], LR)
        assert executor.run._graphs == {}
    assert calls == {False: [12, 8], True: [8, 4]}  # the first of two passes uses a kept graph up


def test_kept_graphs_hold_no_memory_of_slices_that_leave(tmp_path):
    """Between the passes a layer that is stored elsewhere is NaN, and so are the buffers that its bytes were in."""
    made = steps(2)
    keep = MemoryPlan.uniform(2, parameters="disk", states="host", activations="keep")
    want = outcome(layer_major(make_decoder("gqa").train(), plain(), tmp_path), made)
    executor = layer_major(make_decoder("gqa").train(), keep, tmp_path)
    forward = executor.run.forward

    def spoil_after(batches):
        finite = forward(batches)
        pool = executor.run.offloader.parameters
        pool.flush()
        for slot in pool._slots.slots:
            slot.buffer.live.fill_(255)
            slot.holds = None
        return finite

    executor.run.forward = spoil_after
    assert_same(outcome(executor, made), want)


def test_a_kept_graph_weighs_what_the_standard_executor_keeps(tmp_path):
    """Bytes alive after the forward pass, beyond those with everything recomputed: what autograd saves of the layer."""
    alive, batches = {}, steps(1)[0]
    for kept in ((), (1,), (0, 1)):
        model = make_decoder("gqa").train()
        kinds = ["keep" if index in kept else "recompute" for index in range(2)]
        layers = tuple(LayerMemory(activations=kind) for kind in kinds)
        executor = layer_major(model, MemoryPlan(layers=layers), tmp_path)
        with AliveStorages() as storages:
            executor.run.forward(batches)
        alive[kept] = storages.alive_bytes()
        executor.run.end()
        executor.close()
    model, expected = make_decoder("gqa").train(), [0, 0]
    for batch in batches:
        for index, size in enumerate(saved_bytes(model, batch)):
            expected[index] += size - batch["input_ids"].numel() * model.config.dim * 4  # its input is there anyway
    assert alive[(1,)] - alive[()] == pytest.approx(expected[1], rel=0.02)
    assert alive[(0, 1)] - alive[(1,)] == pytest.approx(expected[0], rel=0.02)


class Faulty:
    """Operations of a backward pass that fail for want of memory: every call with a chance, a piece at most twice."""

    def __init__(self, draw):
        self.draw, self.failed = draw, 0

    def again(self, piece, on_oom):
        for _ in range(2):
            try:
                with OneOperationFails(self.draw.randrange(60)):
                    return piece()
            except torch.OutOfMemoryError:
                self.failed += 1
        return piece()


class OneOperationFails(TorchDispatchMode):
    """The n-th operation inside, forward or backward, finds no memory."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "delayed"), covering(("tied", "gqa_moe"), (False, True), pairs=False))
def test_pieces_of_the_backward_pass_that_fail_are_done_again(name, delayed, tmp_path):
    """Failures at random operations, also between the gradients of two parameters, and after some are added up."""
    made, want = steps(2), None
    for seed in range(4):
        model = make_decoder(name).train()
        for block in model.blocks:
            block.self_attn.o_proj = Dropped(block.self_attn.o_proj)
        model.model.norm = Dropped(model.model.norm)
        draw = random.Random(seed)
        executor = layer_major(model, drawn(draw) if seed else plain(), tmp_path, delayed=delayed)
        faulty = Faulty(draw)
        if seed:
            executor.run.retry = faulty.again
        torch.manual_seed(5)
        got = outcome(executor, made)
        want = want or got
        assert_same(got, want)
        assert seed == 0 or faulty.failed > 10


def test_kept_graphs_can_be_let_go_in_mid_step(tmp_path):
    made = steps(2)
    want = outcome(layer_major(make_decoder("gqa").train(), plain(), tmp_path), made)
    executor = layer_major(make_decoder("gqa").train(), MemoryPlan.uniform(2, activations="keep"), tmp_path)
    forward = executor.run.forward

    def then_let_go(batches):
        finite = forward(batches)
        assert executor.run._graphs
        executor.run.free_saved_graphs()
        return finite

    executor.run.forward = then_let_go
    assert_same(outcome(executor, made), want)


def test_a_checkpoint_is_the_same_wherever_slices_have_moved_to(tmp_path):
    """What a checkpoint refers to was made before the first move."""
    write_text(tmp_path / "text")
    found = []
    changes = [plain(), MemoryPlan.uniform(2, parameters="disk", states="host", inputs="disk", activations="keep")]
    for number, change in enumerate(changes):
        loaded = tiny(tmp_path, tmp_path, precision__mode="fp32", memory__executor="layer_major")
        parts = assemble.build(assemble.set_up(loaded), fresh=True)
        state = parts.state()
        microbatches = [parts.stream.next_step() for _ in range(2)]
        parts.executor.step(microbatches[0], LR)
        parts.executor.apply_memory_plan(change)
        parts.executor.step(microbatches[1], LR)
        assert parts.executor.access.is_finite(parts.model)
        with parts.executor.access.forward_passes(parts.model):
            found.append([parts.model.loss(microbatches[0][0]).loss_sum.item()])
        store = CheckpointStore(tmp_path / f"checkpoints{number}")
        state.save(store, 2, state.meta(), now=True)
        path, _ = store.newest_sound()
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored_tensors(path).items()}
        read_tensors(path, tensors)
        found[-1].append(tensors)
        store.close()
        parts.close()
    (loss, tensors), (moved_loss, moved) = found
    assert loss == moved_loss
    assert tensors.keys() == moved.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, moved[name])] == []


# ---- what cannot be done ----


def test_what_cannot_be_changed_changes_nothing(tmp_path):
    made = steps(3)
    want = outcome(layer_major(make_decoder("gqa").train(), plain(), tmp_path), made)
    executor = layer_major(make_decoder("gqa").train(), drawn(random.Random(1)), tmp_path)
    before = executor.memory_plan
    refused = [
        (MemoryPlan.uniform(3), "another model"),
        (MemoryPlan.uniform(2, activations="selective"), "selected activations"),
        (MemoryPlan.uniform(2, mlp_chunks=2), "cannot change during a run"),
        (MemoryPlan.uniform(2, attention_block=8), "cannot change during a run"),
    ]
    for memory_plan, says in refused:
        with pytest.raises(ConfigError, match=says):
            executor.apply_memory_plan(memory_plan)
        assert executor.memory_plan == before
    assert_same(outcome(executor, made), want)


def test_layers_of_one_slice_stay_together(tmp_path):
    mixed = MemoryPlan(layers=(LayerMemory(states="disk"), LayerMemory()))
    with pytest.raises(ConfigError, match="several places") as caught:
        layer_major(make_decoder("gqa"), mixed, tmp_path, group=2)
    assert "memory.layers_per_group = 1" in caught.value.problems[0].try_


def test_a_tier_without_room_leaves_all_where_it_was(tmp_path, monkeypatch):
    """The third slice that moves finds no room: the two before it go back."""
    made = steps(3)
    want = outcome(layer_major(make_decoder("gqa").train(), plain(), tmp_path), made)
    first = MemoryPlan.uniform(2, parameters="host", inputs="host", activations="recompute")
    executor = layer_major(make_decoder("gqa").train(), first, tmp_path)
    home, moved = executor.run.offloader, []
    move = home.parameters.move

    def full(name, tier):
        if len(moved) == 2 and tier == "disk":
            raise torch.OutOfMemoryError("no room")
        moved.append(name)
        move(name, tier)

    before = executor.memory_plan
    monkeypatch.setattr(home.parameters, "move", full)
    with pytest.raises(torch.OutOfMemoryError):
        executor.apply_memory_plan(MemoryPlan.uniform(2, parameters="disk", states="disk", inputs="disk"))
    assert len(moved) > 2
    monkeypatch.undo()
    assert executor.memory_plan == before
    assert_same(outcome(executor, made), want)


def test_without_a_residence_all_begins_on_the_device(tmp_path):
    made = steps(2)
    want = outcome(layer_major(make_decoder("gqa").train(), plain(), tmp_path), made)
    model = make_decoder("gqa").train()
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), betas=(0.9, 0.95))
    executor = LayerMajorExecutor(model, model, find_layer_groups(model, model), optimizer, clip=GradClip(0.5))
    assert executor.memory_plan == plain()
    moved = MemoryPlan.uniform(2, states="host", activations="keep")
    executor.apply_memory_plan(moved)
    assert executor.memory_plan == moved
    assert_same(outcome(executor, made), want)
