"""Bytes of a rank's plan beside those that torch's own tracker counts of FSDP2 on fake tensors (`FSDPMemTracker`)."""

import pytest

from tests.planner.simulate.mesh.tracked import LLAMA, apart, planned

SMALL = LLAMA | {
    "model.dim": "512", "model.num_layers": "6", "model.num_heads": "8", "model.ffn_dim": "1408",
    "data.vocab_size": "2048", "data.seq_len": "2048",
}  # fmt: skip
FULL, SELECTIVE = ({"train.activation_checkpoint": kind} for kind in ("full", "selective"))
ALWAYS = ("parameters", "gradients", "optimizer")
CASES = {
    "recomputed": FULL,
    "matmuls kept": SELECTIVE,
    "ZeRO-2": FULL | {"parallel.reshard_after_forward": "false"},
    "8-bit moments": FULL | {"optim.moments": "8bit"},
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_of_shards_holds_what_torch_counts(name):
    settings = SMALL | CASES[name]
    found, counted = apart(settings, 8, timeout_s=300.0), planned(settings, 8)
    for owner in ALWAYS:
        assert counted[owner] == pytest.approx(found[owner], rel=2e-3), owner
    assert counted["activations"] == pytest.approx(found["activations"], rel=0.05)
    assert counted["peak"] == pytest.approx(found["peak"], rel=0.05)
