"""Which tokenizer makes the ids of a recipe's run, and whether its rows fit the model. Loads no data: plans ask it."""

from tilewright.core.config.recipe import DataSection, Recipe
from tilewright.core.config.sections.model import ModelSection
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.common.tokenizer_folder import folder_tokenizer
from tilewright.models.build import check_data
from tilewright.models.folder.find_model import local_folder


def check_rows(recipe: Recipe) -> None:
    """Check rows of a recipe with the tokenizer: raise where they would not fit its model; nothing is prepared and no
    weight is read.

    Raises:
        ConfigError: no tokenizer for loaded weights, an id beyond the embedding, rows beyond a table of positions, or
            an architecture that does not do the task.
        DataError: a tokenizer that cannot be read.
    """
    tokenizer = tokenizer_path(recipe.model, recipe.data)
    check_data(recipe.model, recipe.data.seq_len, load_tokenizer(tokenizer).vocab_size if tokenizer else None)


def tokenizer_path(model: ModelSection, data: DataSection) -> str:
    """The path of the tokenizer that makes the ids of a recipe's run: the given one, else the one that loaded weights
    learned with.

    Returns:
        A tokenizer.json or a folder that holds one; "" where one is trained on the data, or where there is no text.

    Raises:
        ConfigError: weights are loaded from a folder without a tokenizer.json, and no other is given.
    """
    if model.task == "image_classification":
        return ""
    if data.tokenizer or model.weights == "random":
        return data.tokenizer
    return folder_tokenizer(local_folder(model.path))
