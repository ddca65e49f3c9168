"""Which matrices are cut, what a rank has of them, and what cannot be cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models.shapes import KERNELS
from tests.parallel.inside.tensor.cut import CONFIGS
from tilewright.core.errors import ConfigError
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.inside.tensor.matrix_cuts import check_cuts, config_on_rank, cut_dims


def on_meta(config):
    with torch.device("meta"):
        return Decoder(config, KERNELS)


EVEN = [
    (kind, tp) for kind, config in sorted(CONFIGS.items()) for tp in (1, 2, 3, 4)
    if config.num_heads % tp == 0 and config.num_kv_heads % tp == 0 and config.ffn_dim % tp == 0
]  # fmt: skip


@given(st.sampled_from(EVEN), st.sampled_from([1, 2]))
def test_a_rank_has_a_decoder_of_its_own_sizes(cut, shards):
    """What is left of each matrix is that of a smaller decoder, by which plans count."""
    kind, tp = cut
    whole, part = on_meta(CONFIGS[kind]), on_meta(config_on_rank(CONFIGS[kind], tp, shards))
    check_cuts(whole, tp, shards)
    dims = cut_dims(whole, tp, shards)
    sizes = dict(part.named_parameters())
    for name, module in whole.named_modules():
        for own, param in module.named_parameters(recurse=False):
            shape = list(param.shape)
            if module in dims:
                shape[dims[module]] //= tp
            key = f"{name}.{own}"
            if key in sizes:
                assert list(sizes[key].shape) == shape, key
    vocabulary = {whole.model.embed_tokens, whole.lm_head}
    assert vocabulary <= dims.keys() or (vocabulary.isdisjoint(dims) and CONFIGS[kind].vocab_size % (tp * shards))


@pytest.mark.parametrize(
    ("model", "tp", "shards", "words"),
    [
        (lambda: nn.Linear(2, 2), 2, 1, ("Linear", "--parallel.tp 1")),
        (
            lambda: on_meta(replace(CONFIGS["moe"], expert_dim=25)),
            *(2, 1, ("Hidden width of the shared experts", "25 wide", "--parallel.tp 1")),
        ),
        (lambda: on_meta(CONFIGS["gqa"]), 8, 1, ("num_kv_heads = 4", "divides 4: 1, 2, 4", "--parallel.tp 4")),
        (lambda: on_meta(CONFIGS["gqa"]), 3, 1, ("num_heads = 8", "divides 8: 1, 2, 4, 8", "--parallel.tp 2")),
        (lambda: on_meta(replace(CONFIGS["mla"], ffn_dim=90)), 4, 1, ("ffn_dim = 90", "--parallel.tp 2")),
        (lambda: on_meta(CONFIGS["gqa"]), 2, 3, ("32 rows", "dp_shard = 3", "divide by tp x dp_shard = 6")),
    ],
)
def test_what_cannot_be_cut(model, tp, shards, words):
    with pytest.raises(ConfigError) as caught:
        check_cuts(model(), tp, shards)
    for text in words:
        assert text in str(caught.value)
    assert caught.value.problems[0].where == "parallel.tp"
