"""What a plan assumes of how documents are kept apart, against what the run finds out on real tensors."""

import pytest
import torch

from tests.zoo.families import TRAINED, VOCAB
from tilewright.models.hf.probe_packing import REFUSALS, probe_language_model
from tilewright.planner.trace.fake_model import document_styles, quiet, text_inputs, to_fake
from tilewright.planner.trace.fake_operations import TraceMode

transformers = pytest.importorskip("transformers")
TEXT = [family for family in TRAINED if family.batch == "text" and family.kind != "encoder-decoder"]


def planned(model) -> str:
    """The first style that the model takes, as in a trace."""
    device = torch.device("cpu")
    with TraceMode(), quiet():
        to_fake(model, device)
        for style in document_styles(model):
            ids, arguments = text_inputs(model, 2, 16, device, style)
            try:
                model.net(input_ids=ids, **arguments)
            except REFUSALS:
                continue
            return style
    return "no style"


FEW = {
    "gpt2", "gemma2", "granitemoe",  # positions
    "modernbert", "bloom", "mamba2", "rwkv", "qwen3_next",  # rows
    "bert",  # blocks
    "jetmoe",  # not traced
}  # fmt: skip
"""By default: families of each answer, with attention, experts and states."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each.name in FEW else pytest.mark.slow, id=each.name) for each in TEXT],
)
def test_the_plan_keeps_documents_apart_as_the_run_does(family):
    found = probe_language_model(family.model().net, VOCAB)
    with torch.device("meta"):
        model = family.model().bfloat16()
    untraceable = family.name in ("jetmoe", "longcat_flash")  # their routing needs data
    assert planned(model) == ("no style" if untraceable else found.documents)
