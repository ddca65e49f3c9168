"""Rows of a model's initial values equal those of the whole, and nothing else is read."""

import functools
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.test_lazy import make_foreign
from tests.models.shapes import KERNELS, SHAPES, load_decoder, make_decoder
from tests.models.test_fp8_io import NETS, write_plain
from tests.parallel.steps import HF_SIZES
from tilewright.memory.offload.lazy_params import to_placeholders
from tilewright.models.build import init_weights, random_values, stored_values
from tilewright.models.decoder import hf_weights, init
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import save_decoder
from tilewright.models.decoder.init import decoder_values, fill_normal, name_seed
from tilewright.models.folder import fp8_weights
from tilewright.models.folder.row_wise import Recorded, read_rows
from tilewright.models.folder.safetensors import open_file
from tilewright.models.hf.load import load_hf

BLOCK = 2**18
SIZES = [1, 15, 16, 17, 1000, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 15, 2 * BLOCK + 7, 3 * BLOCK, 3 * BLOCK + 24]


def parts_of(rows, world):
    """(first row, rows) of each rank, as torch cuts."""
    chunks = torch.arange(rows).chunk(world)
    return [(int(chunk[0]), len(chunk)) for chunk in chunks]


def assert_parts(values, name, whole, worlds=(1, 2, 3, 4)):
    """The parts that ranks ask for are those of the whole."""
    for world in worlds:
        for first, rows in parts_of(len(whole), world):
            part = torch.full((rows, *whole.shape[1:]), float("nan"), dtype=whole.dtype)
            values({name: part}, {name: first})
            assert torch.equal(part, whole[first : first + rows]), f"{name}, {rows} rows from {first} of {len(whole)}"


# ---- drawing ----


@functools.cache
def drawn_whole(count):
    return torch.empty(count).normal_(0, 0.02, generator=torch.Generator().manual_seed(7))


@given(st.data())
def test_numbers_are_those_of_one_draw(data):
    """For all sizes: torch draws fewer than 16 otherwise, and the last 16 again where they do not come out even."""
    count = data.draw(st.sampled_from(SIZES) | st.integers(1, 2 * BLOCK))
    whole = torch.empty(count).normal_(0, 0.02, generator=torch.Generator().manual_seed(7))
    first = data.draw(st.integers(0, count - 1))
    out = torch.full((data.draw(st.integers(1, count - first)),), float("nan"))
    fill_normal(out, first, count, 0.02, 7)
    assert torch.equal(out, whole[first : first + len(out)])


def test_a_large_parameter_is_drawn_from_several_generators():
    """40 million numbers, in rows that do not divide the 16Mi elements of a generator."""
    rows, width, piece = 1001, 40_000, 2**24
    name = "model.embed_tokens.weight"
    with torch.device("meta"):
        model = Decoder(_resized(rows, width), KERNELS)
    whole = torch.empty(rows * width)
    for index, part in enumerate(whole.split(piece)):
        generator = torch.Generator().manual_seed(name_seed(3, f"{name}[{index}]" if index else name))
        part.normal_(0, model.config.init_std, generator=generator)
    assert_parts(decoder_values(model, 3), name, whole.view(rows, width), worlds=(1, 3))


def _resized(vocab, dim):
    from tilewright.models.decoder.config import DecoderConfig

    return DecoderConfig.of(vocab_size=vocab, dim=dim, num_layers=1, num_heads=4, ffn_dim=8)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_a_random_decoder(name):
    model = Decoder(SHAPES[name], KERNELS)
    init_weights(model, 5)
    for key, whole in model.named_parameters():
        assert_parts(random_values(model, 5), key, whole.detach())


def test_other_pieces_are_not_drawn(monkeypatch):
    """A rank draws the pieces that its rows are in."""
    monkeypatch.setattr(init, "_PIECE", 64)
    drawn = []
    monkeypatch.setattr(init, "fill_normal", lambda out, offset, count, std, seed: drawn.append((offset, count)))
    with torch.device("meta"):
        model = Decoder(SHAPES["gqa"], KERNELS)  # gate_proj is [96, 64]: each row is a piece
    name = "model.layers.0.mlp.gate_proj.weight"
    random_values(model, 0)({name: torch.empty(3, 64)}, {name: 10})
    assert drawn == [(0, 64), (-64, 64), (-128, 64)]


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_parts_of_a_random_hugging_face_model(name):
    model = make_foreign(name)
    init_weights(model, 5)
    meta = make_foreign(name, device="meta")
    to_placeholders(meta, "cpu")
    values = random_values(meta, 5)
    for key, whole in list(model.named_parameters())[:12]:
        assert_parts(values, key, whole.detach(), worlds=(3,))


# ---- reading ----


@contextmanager
def counted_bytes(monkeypatch):
    """Bytes that readers of safetensors are asked for inside."""
    asked = []

    class View:
        def __init__(self, view):
            self.view = view

        def __getitem__(self, rows):
            got = self.view[rows]
            asked.append(got.nbytes)
            return got

    class Reader:
        def __init__(self, reader):
            self.reader = reader

        def get_slice(self, name):
            return View(self.reader.get_slice(name))

        def get_tensor(self, name):
            asked.append(self.reader.get_tensor(name).nbytes)
            return self.reader.get_tensor(name)

    @contextmanager
    def counting(file):
        with open_file(file) as reader:
            yield Reader(reader)

    with monkeypatch.context() as patch:
        patch.setattr(hf_weights, "open_file", counting)
        patch.setattr(fp8_weights, "open_file", counting)
        yield asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gqa", "mla_q_rank", "deepseek"])
def test_parts_of_a_stored_decoder(name, dtype, tmp_path, monkeypatch):
    save_decoder(make_decoder(name), tmp_path, dtype=dtype, shard_bytes=100_000)
    model = load_decoder(tmp_path, KERNELS)
    values = stored_values(Decoder(SHAPES[name], KERNELS), tmp_path)
    for key, whole in model.named_parameters():
        assert_parts(values, key, whole.detach())
        with counted_bytes(monkeypatch) as asked:
            first, rows = parts_of(len(whole), 3)[1]
            values({key: torch.empty(rows, *whole.shape[1:])}, {key: first})
        assert sum(asked) == whole[first : first + rows].numel() * dtype.itemsize, key


@pytest.mark.parametrize("name", ["llama ragged", "deepseek ragged"])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_parts_of_an_fp8_folder(name, block, tmp_path, monkeypatch):
    """Rows of whole scale blocks are read: fewer than a block beyond the part. They are decoded as in the whole."""
    torch.manual_seed(0)
    want = write_plain(NETS[name](), tmp_path, block=block)
    models = {"decoder": Decoder(hf_weights.read_config(tmp_path), KERNELS)}
    models["hf"] = load_hf(tmp_path, "causal_lm", kernels=KERNELS, device="meta")
    for kind, model in models.items():
        values, prefix = stored_values(model, tmp_path), "net." if kind == "hf" else ""
        for key, whole in want.items():
            if "experts." in key or key == "lm_head.weight" or "correction_bias" in key:
                continue  # stacked in the Hugging Face model; tied; a buffer
            assert_parts(values, prefix + key, whole, worlds=(1, 3))
            with counted_bytes(monkeypatch) as asked:
                first, rows = parts_of(len(whole), 3)[1]
                values({prefix + key: torch.empty(rows, *whole.shape[1:])}, {prefix + key: first})
            grid = -(-whole[0].numel() // block[1]) * -(-len(whole) // block[0]) * 4
            assert sum(asked) <= max((rows + block[0]) * whole[0].numel() + grid, whole[:rows].nbytes), key


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_are_read_one_by_one(name, tmp_path, monkeypatch):
    """transformers keeps the experts of a layer in one parameter, and the folder each in files of its own."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **HF_SIZES, num_key_value_heads=2, num_experts=5, moe_intermediate_size=24)
    model = load_hf(config, "causal_lm", kernels=KERNELS)
    init_weights(model, 5)
    model.net.save_pretrained(tmp_path)
    meta = load_hf(config, "causal_lm", kernels=KERNELS, device="meta")
    values = stored_values(meta, tmp_path)
    assert meta.notes == []
    stacked = 0
    for key, whole in model.named_parameters():
        assert_parts(values, key, whole.detach())
        with counted_bytes(monkeypatch) as asked:
            first, rows = parts_of(len(whole), 2)[-1]
            values({key: torch.empty(rows, *whole.shape[1:])}, {key: first})
        assert sum(asked) == whole[first:].nbytes, key
        stacked += whole.ndim == 3
    assert stacked >= 2


# ---- what is computed from stored tensors ----

SOURCES = {name: torch.arange(24.0).view(4, 6) + 100 * i for i, name in enumerate("abc")}
PROGRAMS = {
    "stack": (lambda t: torch.stack([t["a"], t["b"], t["c"]]), True),
    "stack behind": (lambda t: torch.stack([t["a"], t["b"]], dim=-1), True),
    "cat": (lambda t: torch.cat([t["a"], t["b"], t["c"]]), True),
    "cat behind": (lambda t: torch.cat([t["a"], t["b"]], dim=1), True),
    "gate and up": (lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["c"]])], dim=1), True),
    "third of four": (lambda t: torch.chunk(torch.cat([t["a"], t["b"]]), 4, dim=0)[2].contiguous(), True),
    "split": (lambda t: torch.split(t["a"], [1, 3], dim=0)[1], True),
    "split behind": (lambda t: t["a"].split([2, 4], dim=1)[1], True),
    "one of a stack": (lambda t: torch.chunk(torch.stack([t["a"], t["b"]]), 2)[1].squeeze(0), False),
    "transposed behind": (lambda t: torch.stack([t["a"], t["b"]]).transpose(1, 2).contiguous(), True),
    "transposed": (lambda t: torch.transpose(t["a"], dim0=0, dim1=1).contiguous(), False),
    "flat rows": (lambda t: torch.stack([t["a"], t["b"]]).reshape(2, -1), True),
    "other rows": (lambda t: t["a"].reshape(8, 3), False),
    "permuted": (lambda t: t["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6), False),
    "computed": (lambda t: -torch.exp(t["a"]), False),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_computed_tensors(name):
    """Equal to torch's, for all ranges; where rows stay rows, no element is read that is not among them."""
    program, by_rows = PROGRAMS[name]
    whole = program(SOURCES)
    recorded = program({key: Recorded.stored(key, tuple(tensor.shape)) for key, tensor in SOURCES.items()})
    assert recorded.shape == whole.shape
    read = []

    def rows_of(key, start, stop):
        read.append(SOURCES[key][start:stop].numel())
        return SOURCES[key][start:stop]

    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            read.clear()
            assert torch.equal(read_rows(recorded, start, stop, rows_of), whole[start:stop]), (start, stop)
            wanted = whole[start:stop].numel()
            assert sum(read) == wanted or ("behind" in name and "split" in name) or not by_rows, (start, stop, read)


def test_a_tensor_that_is_changed_in_place_is_not_followed():
    tensor = Recorded.stored("a", (4, 6))
    with pytest.raises(ValueError, match="mul_"):
        tensor.mul_(2)
