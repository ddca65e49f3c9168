"""What a run asks of a model is asked of `protocols.Model`, and each model answers it: nobody asks for its class."""

import ast
from pathlib import Path

import pytest
import torch

import tilewright
from tests.cover import some
from tests.models.shapes import KERNELS, SHAPES, make_batch, make_decoder
from tests.models.test_hf_models import CAUSAL, IMAGES, MASKED, make
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.formats.fp8_layout import CODE_DTYPE
from tilewright.models.build import materialize, spec_of
from tilewright.models.decoder.decoder import Decoder

SOURCE = Path(tilewright.__file__).parent
CLASSES = {"Decoder", "HFModel"}
OWN = ("models/decoder/", "models/hf/")
CUTTERS = {"parallel/pipeline/rank_stages.py",
           "parallel/inside/experts/rank_experts.py",
           "parallel/inside/tensor/matrix_cuts.py",
           "parallel/inside/tensor/cut_decoder.py",
           "parallel/parallelize.py",
           "compress/search/search_run.py",
           "training/components/model.py"}  # fmt: skip
"""They take models of these classes apart, and refuse any other in words."""
RENAMED = ("mixtral", "vit")
"""By transformers, between its modules and its folders."""
WORDS = [*SHAPES, *CAUSAL, *MASKED]


def model_of(name):
    return (make_decoder(name) if name in SHAPES else make(name)).eval()


def questions(text: str) -> list[int]:
    """Lines that ask which class a model is of."""
    if not any(name in text for name in CLASSES):
        return []
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 2]
    kinds = [(node, node.args[1]) for node in calls if ast.unparse(node.func) in ("isinstance", "issubclass")]
    kinds += [(node, node) for node in nodes if isinstance(node, ast.Compare) and "type(" in ast.unparse(node)]
    return [node.lineno for node, kind in kinds if CLASSES & {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)}]


def test_nobody_asks_for_the_class():
    files = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    found = {name: lines for name, text in files.items() if not name.startswith(OWN) and (lines := questions(text))}
    assert found.keys() <= CUTTERS


@pytest.mark.parametrize("line", ["isinstance(m, HFModel)", "isinstance(m, (A, Decoder))", "type(m) is Decoder"])
def test_a_question_is_found(line):
    assert questions(f"if {line}: pass") == [1]


@torch.no_grad()
@pytest.mark.parametrize("name", WORDS)
def test_logits_are_the_head_of_hidden_values(name):
    model, ids = model_of(name), make_batch(rows=2, positions=12)["input_ids"]
    logits = model.logits(ids)
    assert logits.shape == (2, 12, 61)
    assert model.head.weight.shape[0] == 61
    try:
        found = model.head(model.hidden({"input_ids": ids}))
    except ConfigError:
        assert name in ("gemma2", *MASKED), "a soft cap behind the matmul, layers before it"
        return
    difference = (found - logits).abs().max().item()
    bound = 2**-20 * model.head.weight.shape[1] * logits.abs().max().item()  # FP32, other masks: other kernels
    print(f"{name}: {difference:.2e} of at most {bound:.2e}")
    assert difference <= bound


@torch.no_grad()
@pytest.mark.parametrize("name", ["gqa", "deepseek", "llama", "qwen3"])
def test_hidden_values_of_documents_are_those_of_rows_of_their_own(name):
    model, ids = model_of(name), make_batch(rows=1, positions=12)["input_ids"]
    segments = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model.hidden({"input_ids": ids, "positions": positions, "segments": segments})
    alone = torch.cat([model.hidden({"input_ids": part}) for part in ids.split((5, 7), dim=1)], dim=1)
    bound = 2**-20 * packed.shape[-1] * alone.abs().max().item()
    print(f"{name}: {(packed - alone).abs().max().item():.2e} of at most {bound:.2e}")
    assert (packed - alone).abs().max().item() <= bound


@pytest.mark.parametrize("name", [*WORDS, *IMAGES])
def test_names_of_a_folder_are_those_of_net(name, tmp_path):
    from safetensors import safe_open

    model = model_of(name)
    try:
        model.check_save_hf(torch.float32)
    except CheckpointError:
        with pytest.raises(CheckpointError):
            model.save_hf(tmp_path)
        return
    model.save_hf(tmp_path)
    stored = {key for file in tmp_path.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert (stored <= model.net.state_dict().keys()) == (name not in RENAMED)
    assert {id(param) for param in model.net.parameters()} == {id(param) for param in model.parameters()}


@pytest.mark.parametrize("name", some([*SHAPES, "llama", "bert", "resnet", "bloom", "gpt2"], *SHAPES, "bert", "resnet"))
def test_what_is_refused_before_is_what_is_refused_when_it_is_written(name, tmp_path):
    """In FP8, which some models have no layers for."""
    said = []
    for attempt in (lambda m: m.check_save_hf(CODE_DTYPE), lambda m: m.save_hf(tmp_path, dtype=CODE_DTYPE)):
        try:
            attempt(model_of(name))
            said.append(None)
        except CheckpointError as error:
            said.append([(problem.what, problem.got) for problem in error.problems])
    assert said[0] == said[1]


@pytest.mark.parametrize("name", [*SHAPES, *CAUSAL, *IMAGES])
def test_blocks_of_attention_are_set_or_refused(name):
    model = model_of(name)
    before = model.attention_blocks
    assert len(before) == (len(model.layers) or 1)
    if isinstance(model, Decoder):
        model.attention_blocks = (8,) * len(before)
        assert model.attention_blocks == (8,) * len(before)
        return
    model.attention_blocks = before
    with pytest.raises(ConfigError) as caught:
        model.attention_blocks = (8,) * len(before)
    assert type(model.net).__name__ in str(caught.value)
    assert model.attention_blocks == before


@pytest.mark.parametrize("name", [*SHAPES, "llama", "qwen3", "gpt2", "bert"])
def test_memory_keeps_what_is_tied_tied(name):
    model = model_of(name)
    tied = {name for name, param in model.state_dict(keep_vars=True).items() if param is model.head.weight}
    materialize(model.to("meta"), "cpu")
    again = {name for name, param in model.state_dict(keep_vars=True).items() if param is model.head.weight}
    assert again == tied


@pytest.mark.parametrize("name", [*SHAPES, *CAUSAL, *IMAGES])
def test_a_model_of_its_config_alone_has_its_names(name):
    model = model_of(name)
    meta_model = spec_of(model.architecture).meta_model
    made = meta_model(model.config, KERNELS, model.task).state_dict()
    assert {k: t.shape for k, t in made.items()} == {k: t.shape for k, t in model.state_dict().items()}
    assert {t.device.type for t in made.values()} == {"meta"}


@pytest.mark.parametrize(("name", "limit"), [("gqa", None), ("llama", 64), ("opt", 64), ("bloom", None), ("vit", None)])
def test_most_positions(name, limit):
    assert model_of(name).max_positions == limit
