"""The session in which tilewright itself answers for an export."""

import numpy as np
import pytest
import torch

from tests.compress.models import decoder
from tilewright.compress.prove.consumer_session import CACHED_AT, Request
from tilewright.compress.prove.torch_model import DTYPES, TorchModel
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.hardware import detect_machine
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.linear import CACHED_LAYER
from tilewright.precision.mixed.row_block import RowBlock


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cached_token_is_answered_as_generate_does(dtype, tmp_path):
    """Layers take a cached token in one call where this CPU has code for it; logits of a row stay the model's."""
    model = decoder()
    model.save_hf(tmp_path)
    section = ModelSection(weights="load")
    options = {"section": section.model_dump(), "vocab_size": model.config.vocab_size, "weights": ""}
    options |= {"dtype": dtype, "compile": False}
    session = TorchModel(Request(str(tmp_path), "", "", torch.get_num_threads(), options=options))
    found = choose(CACHED_LAYER, detect_machine("cpu"), Case("cpu", DTYPES[dtype])).candidate
    fast = [layer for layer in session.model.modules() if isinstance(layer, RowBlock)]
    assert len(fast) == (model.config.num_layers if found.name != "ref" else 0)
    ids_S = np.random.default_rng(0).integers(0, model.config.vocab_size, CACHED_AT + 1)
    assert (session.cached_token_s(ids_S) or 0) > 0
    with torch.no_grad():
        wanted = model.to(DTYPES[dtype]).logits(torch.from_numpy(ids_S[None, :8]))[0].float().numpy()
    # Sums of up to `ffn_dim` terms are of another order, two layers of two each. BF16 sums in FP32 and rounds.
    terms = model.config.ffn_dim**0.5 if dtype == "fp32" else 1
    bound = 4 * terms * torch.finfo(DTYPES[dtype]).eps * np.abs(wanted).max()
    np.testing.assert_allclose(session.logits(ids_S[:8], np.arange(8)), wanted, rtol=0, atol=bound)
