"""The precision controller on matrices that are cut: all ranks decide alike, on the worst of their parts; they find
what one process finds of a feature that is far too large, and formats move on the parts."""

from functools import partial

import pytest
import torch

from tests.parallel.inside.tensor import cut as own
from tests.parallel.inside.tensor import test_cut_hf_model as foreign
from tests.parallel.inside.tensor.test_formats import TILES
from tests.parallel.steps import groups_of, microbatches
from tests.precision.test_controller_dist import decisions
from tests.ranks import of_one_rank, on_ranks
from tilewright.data.batches.microbatches import count_targets
from tilewright.ops.base.tensor_parts import local, part_of
from tilewright.optim.clip import GradClip
from tilewright.parallel.world import World
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.policy.policy import Policy
from tilewright.training.executor.standard import StandardExecutor

pytestmark = pytest.mark.dist
STEPS, SPOILED = 6, range(2, 4)
SETTINGS = ControllerSettings(budget=0.6, cooldown=1, patience=1, interval=2, recalibrate_interval=1000)
POLICY = Policy("fp8_tile", keep="value", device_type="cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 8, "head_dim": 32}
CASES = {"own": (own, own.Case(2, kind="tiles", mode=POLICY))}
CASES["adapted"] = (own, own.Case(2, kind="tiles", mode=POLICY, lora="keep"))
CASES["foreign"] = (foreign, foreign.Case("llama", more=SIZES, mode=POLICY))


def decide(model, world, sites=None, spoiled="input_layernorm"):
    """What moved when, the formats at the end, and the loss of each step."""
    control = PrecisionController(model, SETTINGS, group=world.everyone.handle, sites=sites)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    clip = GradClip(1.0, row=world.row.handle, experts=world.experts.handle)
    executor = StandardExecutor(model, optimizer, clip=clip, control=control, **groups_of(world))
    weight = next(module for name, module in model.named_modules() if name.endswith(spoiled)).weight
    batches, told, losses = microbatches(0, 1), [], []

    def look():
        (model.loss(batches[0]).loss_sum / count_targets(batches)).backward()

    for step in range(STEPS):
        with torch.no_grad():  # one feature so large that others are flushed
            if 0 in part_of(weight).rows:
                local(weight)[0] = 2.0**24 if step in SPOILED else 1.0
        control.enter(step)
        if control.due(step):
            control.sample(step, [look])
        losses.append(executor.step(batches, lr=1e-2).loss)
        told += [row for row in control.take_rows() if row["kind"] != "sample"]
    return decisions(told), control.controller.formats(), losses


def _alone(kind):
    own.CONFIGS["tiles"] = TILES
    models, case = CASES[kind]
    return decide(models.whole(case), World.alone())


def _decided(rank, kinds):
    own.CONFIGS["tiles"] = TILES
    found = {}
    for kind in kinds:
        models, case = CASES[kind]
        world = own.world_of(case)
        found[kind] = decide(models.cut(case, world), world), of_one_rank(partial(_alone, kind))
    return found


def spoiled(told, where="layers.0."):
    """Forward matmuls of the first layer, or of others, that have left 8 bits since it was spoiled."""
    moves = [row for row in told if row["kind"] == "move" and row["step"] > SPOILED.start]
    return {(row["layer"], row["after"]) for row in moves if row["gemm"] == "fprop" and where in row["layer"]}


def check(of_ranks):
    for kind, (told, formats, losses) in ((kind, ours) for kind, (ours, _) in of_ranks[0].items()):
        for found in of_ranks[1:]:
            assert found[kind][0] == (told, formats, losses), f"{kind}: all ranks decide alike"
        alone, _, theirs_losses = of_ranks[0][kind][1]
        print(kind, told, losses, theirs_losses)
        assert spoiled(told) == spoiled(alone), f"{kind}: as one process does"
        assert len(spoiled(told)) == 6, f"{kind}: the three that read the feature move, and return"
        for step, (ours, theirs) in enumerate(zip(losses, theirs_losses, strict=True)):
            # A feature of 2^24 makes attention choose one position, and a last bit decides which.
            assert ours == pytest.approx(theirs, rel=5e-2 if step in SPOILED else 2e-3), f"{kind}, step {step}"


@pytest.mark.support("controller", "tensor")
@pytest.mark.slow
def test_ranks_decide_alike_and_as_one_process_does():
    check(on_ranks(2, _decided, list(CASES)))
