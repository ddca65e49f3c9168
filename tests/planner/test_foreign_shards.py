"""What a rank holds of a Hugging Face model whose matrices are cut, by its plan: the parts that transformers' plan
leaves of each tensor, and of stacked experts those of all ranks that share them."""

import pickle
import re
from math import prod

import pytest

from tests.cover import some
from tests.planner.rates import make_machine, make_rates, make_recipe
from tests.training.test_tensor_hf import write_model
from tilewright.models.build import build_model
from tilewright.planner.cost.layer_choices import GlobalConfig, state_bytes
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.simulate.mesh.mesh_model import MeshModel, ShapeKey

ENDS, MLP, ATTENTION = r"embed_tokens|lm_head", r"(mlp|shared_experts)\.(gate|up|down)_proj", r"[qkvo]_proj"
CUT = {
    "llama": f"{ENDS}|{MLP}|{ATTENTION}",
    "qwen3_moe": f"{ENDS}|{ATTENTION}",
    "deepseek_v3": f"{ENDS}|{MLP}",  # transformers leaves its attention whole
}


MESHES = [
    ("llama", 1, 2, 1),
    ("llama", 2, 2, 1),
    ("qwen3_moe", 2, 1, 1),
    ("qwen3_moe", 2, 2, 2),
    ("deepseek_v3", 2, 1, 2),
]


@pytest.mark.parametrize(("family", "tp", "shards", "ep"), some(MESHES, MESHES[-1]))
def test_a_rank_holds_its_parts_of_cut_matrices(tmp_path, family, tp, shards, ep):
    """FP32 parameters and moments; every number of rows comes out even."""
    model = {name.removeprefix("model__"): value for name, value in write_model(tmp_path, family).items()}
    recipe = make_recipe(model=model, parallel={"dp_shard": shards, "tp": tp, "ep": ep}, precision={"mode": "fp32"})
    finder = ShapeFinder(300, make_machine())
    shape, setting = finder.find(recipe), GlobalConfig.of(recipe)
    wanted = 0
    for name, param in build_model(recipe.model, 300, device="meta").named_parameters():
        cut = tp if re.search(CUT[family], name) or ".experts." in name else 1
        wanted += prod(param.shape) / cut / shards
    part = shape.weights.part(shards)
    assert part.stored == pytest.approx(4 * wanted, rel=1e-3), "vectors of norms may not come out even"
    assert state_bytes(part, setting) == pytest.approx(8 * wanted, rel=1e-3)
    assert setting.shards.beside(shape).cut == (shards > 1 or (tp > 1 and family != "llama"))
    assert not shape.unknown
    assert pickle.loads(pickle.dumps(finder)).find(recipe) == shape, "it goes to other processes"


@pytest.mark.parametrize(("tp", "shards"), some([(1, 2), (2, 1), (2, 2)], (2, 2)))
def test_a_simulated_rank_holds_the_experts_of_its_plan(tmp_path, tp, shards):
    model = {name.removeprefix("model__"): value for name, value in write_model(tmp_path, "qwen3_moe").items()}
    recipe = make_recipe(model=model, parallel={"dp_shard": shards, "tp": tp, "ep": 2}, precision={"mode": "fp32"})
    planned = ShapeFinder(300, make_machine()).find(recipe)
    simulated = MeshModel(recipe, 300, make_machine(), make_rates()).shape(ShapeKey("fp32", 2, tp, shards))
    assert simulated.weights.part(shards).stored == planned.weights.part(shards).stored > 0


def test_layers_are_traced_on_their_parts(tmp_path):
    model = {name.removeprefix("model__"): value for name, value in write_model(tmp_path, "llama").items()}
    one, two = (
        ShapeFinder(300, make_machine()).find(make_recipe(model=model, parallel={"tp": tp}, precision={"mode": "fp32"}))
        for tp in (1, 2)
    )
    (whole,), (part,) = one.classes, two.classes
    assert part.matmul_flops == whole.matmul_flops / 2
    assert part.input == whole.input, "no slices of positions"
    assert whole.kept(1) / 2 < part.kept(1) < whole.kept(1)
    assert (one.vocab_size, two.vocab_size, two.dim) == (300, 150, one.dim)
