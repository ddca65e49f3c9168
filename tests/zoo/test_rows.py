"""Rows of a folder's weights, read alone as a rank of a sharded run does: those of the model that is loaded whole."""

import pytest

from tests.models.test_row_wise import assert_parts
from tests.zoo.families import TRAINED
from tilewright.models.build import stored_values
from tilewright.models.hf.load import load_hf

SAMPLE = ("gpt2", "qwen3_moe", "mamba2")
"""Of the families that are loaded: t5 is refused."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=[] if f.name in SAMPLE else pytest.mark.slow) for f in TRAINED if f.name != "t5"],
)
def test_parts_of_a_folder_are_those_of_the_whole(family, tmp_path):
    family.model().net.save_pretrained(tmp_path)
    meta = load_hf(family.config(), family.task, device="meta")
    values = stored_values(meta, tmp_path)
    assert meta.notes == [], "the folder is loaded whole"
    for name, whole in load_hf(tmp_path, family.task, "load").named_parameters():
        if whole.ndim:
            assert_parts(values, name, whole.detach(), worlds=(2, 3))
