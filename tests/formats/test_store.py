"""FP8 weights as stored: what a quantization_config may say, scales of every dtype, NaN found."""

import pytest
import torch

from tilewright.formats import fp8_layout
from tilewright.formats.scaling import BLOCK_TILE, Tile

PLAIN = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_the_settings_written_are_the_settings_read():
    written = fp8_layout.layout_settings(["lm_head"])
    assert written == PLAIN | {"modules_to_not_convert": ["lm_head"]}
    assert fp8_layout.layout_problems(written) == []
    assert fp8_layout.layout_tile(written) == BLOCK_TILE


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"fmt": None, "activation_scheme": None}, []),
        ({"weight_block_size": (64, 32)}, []),
        ({"quant_method": "gptq", "bits": 4}, ["quantization_config.quant_method = 'gptq'"]),
        ({"weight_block_size": "128"}, ["quantization_config.weight_block_size = '128'"]),
        ({"weight_block_size": [128.0, 128]}, ["quantization_config.weight_block_size = [128.0, 128]"]),
        (
            {"fmt": "e5m2", "weight_block_size": None},
            ["quantization_config.fmt = 'e5m2'", "quantization_config.weight_block_size = None"],
        ),
    ],
)
def test_problems_are_named(change, found):
    assert fp8_layout.layout_problems(PLAIN | change) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_every_dtype_are_exact(dtype):
    scale = torch.tensor([[0.5, 2.0**-9], [1.0, 4.0]])
    assert torch.equal(fp8_layout.scale_values(scale.to(dtype)), scale)
    tiled = fp8_layout.from_stored(torch.ones(3, 4).to(torch.float8_e4m3fn), scale.to(dtype), Tile(2, 2))
    assert torch.equal(tiled.dequantize()[2], torch.tensor([1.0, 1.0, 4.0, 4.0]))


def test_nothing_is_copied_where_nothing_must_be():
    qdata, scale_inv = fp8_layout.to_stored(torch.randn(130, 70))
    tiled = fp8_layout.from_stored(qdata, scale_inv)
    assert (tiled.qdata.data_ptr(), tiled.scale_inv.data_ptr()) == (qdata.data_ptr(), scale_inv.data_ptr())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_both_nan_codes_are_found(code):
    qdata = torch.arange(256, dtype=torch.uint8)
    sound = qdata[(qdata & 0x7F) != 0x7F]
    assert not fp8_layout.has_nan(sound)
    assert fp8_layout.has_nan(torch.cat([sound, torch.tensor([code], dtype=torch.uint8)]).view(torch.float8_e4m3fn))


def test_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match="need scales"):
        fp8_layout.from_stored(torch.zeros(300, 4, dtype=torch.uint8), torch.ones(2, 1))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 70), (3, 300), (0, 5)])
def test_a_weight_without_bytes_has_the_shapes_of_one_with_them(shape):
    for real, shapes in zip(
        fp8_layout.to_stored(torch.ones(shape)), fp8_layout.to_stored(torch.ones(shape, device="meta")), strict=True
    ):
        assert shapes.is_meta
        assert (shapes.shape, shapes.dtype, shapes.stride()) == (real.shape, real.dtype, real.stride())
