"""The model of `tilewright doctor --parallel` where a recipe names a folder: that architecture, small.

Weights are drawn. The vocabulary stays, and the tokenizer and template of the folder come along. What is tried is
whether the small model learns from a short batch; an architecture for which it does not, keeps its layers.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import Loaded
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import TilewrightError
from tilewright.core.hardware import detect_machine
from tilewright.core.log import say
from tilewright.models.build import build_model, decoder_config
from tilewright.models.folder.find_model import local_folder
from tilewright.models.folder.json_file import read_json, write_json
from tilewright.models.folder.shrink_config import smaller
from tilewright.ops.kernels import Kernels
from tilewright.training.components.model import pinned
from tilewright.training.components.recipe_tokenizer import tokenizer_path

REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, TilewrightError)
"""How architectures say that sizes do not go together."""
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
"""Of tokenizer and template."""


def with_small_model(loaded: Loaded, folder: Path, num_layers: int = 2) -> Loaded:
    """The parity check's recipe with a small model of the architecture that it names; unchanged where it names none.

    Args:
        loaded: the recipe. Of a model of the hub the configuration is downloaded, and no weights.
        folder: where the small model's files are put; made.
        num_layers: of it, at least 2.

    Raises:
        TilewrightError: no such model, or no tokenizer in its folder where its weights would be loaded.
    """
    if not loaded.recipe.model.path:
        return loaded
    loaded = pinned(loaded, weights=False)
    recipe = loaded.recipe
    source = Path(local_folder(recipe.model.path)).expanduser()
    config = read_json(source)
    folder.mkdir()
    tokenizer = tokenizer_path(recipe.model, recipe.data)
    for file in (file for pattern in _BESIDE for file in source.glob(pattern)):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    settings = {"model.path": str(folder), "model.weights": "random", "data.tokenizer": tokenizer}
    small = changed(recipe, settings)
    *tries, whole = smaller(config, num_layers)
    words, values = next((found for found in tries if _learns(small.model, found[1])), whole)
    write_json(folder / "config.json", values)
    say(f"{config.get('model_type', 'model')} of {recipe.model.path} with {words}, random weights")
    return replace(loaded, recipe=small)


def _learns(section: ModelSection, config: Mapping[str, Any]) -> bool:
    """True where the parity check's small model learns: the architecture has one of these sizes, and that has
    gradients; its file stays in the folder."""
    write_json(Path(section.path) / "config.json", config)
    try:
        if section.kind != "hf":
            decoder_config(section, 1)
            return True
        kernels = Kernels(detect_machine("cpu"), compile=False)  # one step says whether it runs
        model: Any = build_model(section, 1, kernels, "cpu")
        model.loss(model.short_batch()).loss_sum.backward()
    except REFUSALS:
        return False
    return True
