"""What `search --dry-run` says a search takes, beside what one took."""

import pytest

from tilewright.compress.search.library.layer_parts import places
from tilewright.compress.search.library.replacement_choices import choices_at
from tilewright.compress.search.search_seconds import WIDE, SearchWork, stage_seconds
from tilewright.compress.search.search_settings import KINDS, LayerSearchSettings
from tilewright.models.decoder.config import DecoderConfig


def seconds(steps=25, **changes):
    """Of `cpu_10m` at 100 steps, whose 160 held-out rows took 14 processor seconds on a disturbed machine."""
    config = DecoderConfig.of(vocab_size=8192, dim=320, num_layers=6, num_heads=5, tie_embeddings=True)
    choices = {place: choices_at(config, place, KINDS, 512) for place in places(config)}
    settings = LayerSearchSettings.of("token=60%", ",".join(KINDS), **({"block_steps": 25} | changes))
    work = SearchWork(14 / 81920, scored=15 * 512, held_out=81920, step=16 * 512, seq_len=512, wide=WIDE)
    return stage_seconds(config, choices, settings, steps, work)


def test_the_prediction_is_near_what_a_search_took():
    """It took 651 processor seconds beside its first evaluation: the library 107, the first shape 121, others 104."""
    found = seconds()
    assert sum(found.values()) == pytest.approx(651, rel=0.25)
    assert found["replacements"] == pytest.approx(107, rel=0.25)
    assert found["best shapes"] == pytest.approx(121 + 3 * 104, rel=0.25)


def test_what_more_of_each_costs():
    """Steps of replacements cost in the library alone; the teacher reads its rows once, however many shapes learn."""
    usual, more, fewer = seconds(), seconds(block_steps=50), seconds(candidates=1)
    assert more["replacements"] > usual["replacements"]
    assert {name: value for name, value in more.items() if name != "replacements"} == {
        name: value for name, value in usual.items() if name != "replacements"
    }
    assert usual["best shapes"] / 2 < fewer["best shapes"] < usual["best shapes"]
    assert seconds(steps=50)["best shapes"] < 2 * usual["best shapes"]
