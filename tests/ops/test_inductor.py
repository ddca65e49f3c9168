"""Code that torch.compile makes here is right, whatever the C++ compiler makes of the processor."""

import stat
from dataclasses import replace

import pytest
import torch

from tilewright.core.hardware import detect_machine
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base import compile
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def gradients(compiled: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=256, dim=320, num_layers=1, num_heads=5, num_kv_heads=5, head_dim=64, ffn_dim=384)
    model = Decoder(config, Kernels.default())
    convert(model, "bf16_mixed")
    if compiled:
        model.compile_blocks()
    ids = torch.randint(0, 256, (2, 513), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "segments": torch.zeros(2, 512, dtype=torch.int32)}
    batch["positions"] = torch.arange(512).expand(2, -1)
    (model.loss(batch).loss_sum / ids.numel()).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.slow
def test_a_compiled_bf16_layer_has_the_gradients_of_the_eager_one():
    """Two query blocks of five heads: the transposition that GCC 12 miscompiles under generic tuning."""
    eager, compiled = gradients(compiled=False), gradients(compiled=True)
    for name, want in eager.items():
        got = compiled[name]
        cosine = torch.nn.functional.cosine_similarity(got.flatten().double(), want.flatten().double(), dim=0)
        assert float(cosine) > 0.999, f"{name}: cosine {float(cosine):.5f}"


def test_tuning_is_read_from_gcc(tmp_path):
    gcc = script(tmp_path / "g++", "echo '  -march=  icelake-client'; echo '  -mtune=   generic'")
    clang = script(tmp_path / "clang++", "exit 1")
    assert compile.tuning_of(gcc) == "generic"
    assert compile.tuning_of(clang) is None
    assert compile.tuning_of(str(tmp_path / "absent")) is None


@pytest.fixture
def fresh_answer():
    compile.miscompiles.cache_clear()
    yield
    compile.miscompiles.cache_clear()


def test_generic_tuning_of_avx512_gets_an_architecture(tmp_path, monkeypatch, fresh_answer):
    gcc = script(tmp_path / "g++", "echo '  -mtune=   generic'")
    monkeypatch.setenv("CXX", gcc)
    has = frozenset(compile._PARTS)
    monkeypatch.setattr(compile, "cpu_features", lambda environ=None: has)
    monkeypatch.setattr(compile, "_takes_march", lambda: True)
    assert compile.compile_options() == {"cpp.march": "skylake-avx512"}
    # ATEN_CPU_CAPABILITY=avx2 is for torch: g++ -march=native finds AVX-512 all the same.
    monkeypatch.setattr(compile, "cpu_features", lambda environ=None: frozenset({"avx2"}) if environ is None else has)
    assert compile.compile_options() == {"cpp.march": "haswell"}
    monkeypatch.setattr(compile, "cpu_features", lambda environ=None: has)
    machine = replace(detect_machine("cpu"), cxx_compiler=gcc)
    assert compile.why_no_compile(machine) is None
    monkeypatch.setattr(compile, "_takes_march", lambda: False)  # torch 2.11 and 2.12
    assert compile.compile_options() == {}
    assert "miscompile" in compile.why_no_compile(machine)


def test_an_architecture_is_an_option_of_this_torch_or_not():
    assert compile._takes_march() == ("cpp.march" in torch._inductor.list_options())


def test_other_processors_need_nothing(monkeypatch, fresh_answer):
    monkeypatch.setattr(compile, "cpu_features", lambda environ=None: frozenset({"avx2"}))
    assert compile.compile_options() == {}


@pytest.mark.skipif(compile.why_no_compile(detect_machine("cpu")) is not None, reason="no C++ compiler")
def test_a_compiled_layer_rounds_where_its_code_does():
    """A chain of BF16 operations has eager's bits where torch heeds the option, and FP32 between them without it."""

    def chain(x, y):
        return ((x * y + x) * y - x).sin() * y

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4096, generator=generator).to(torch.bfloat16) for _ in range(2))
    compiled = torch.compile(chain, options=compile.layer_options())
    assert torch.equal(compiled(x, y), chain(x, y)) == compile.rounds_as_eager()
    torch._dynamo.reset()
    fused = torch.compile(chain, options=compile.compile_options())
    assert not torch.equal(fused(x, y), chain(x, y))
    torch._dynamo.reset()
