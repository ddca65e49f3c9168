"""The source of an export: the model of a run in FP32, its tokenizer and recipe, and the data that it is proven on."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.compress.export.stored_codes import Coded, Method, four_bit_codes, trained_codes
from tilewright.core.config.recipe import Recipe
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.models.base.protocols import Model
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy, in_fp32
from tilewright.training.components.export import config_keys
from tilewright.training.components.recipe_data import Prepared, prepare_data
from tilewright.training.components.tokenizer_files import TextRules


@dataclass(frozen=True)
class ExportSource:
    """A run, or a model's folder, opened to be exported or compressed.

    Args:
        run: its folder, with a tokenizer.json where the model reads text.
        recipe: the resolved one.
        text_tokenizer: of the run; None of a model that reads images.
        model: FP32, on the CPU, in evaluation mode; adapters are merged.
        checkpoint: where the weights are from.
        without_tokenizer: write formats that carry a tokenizer without one where theirs cannot be ours.
        method: how weights become four bits, see `stored_codes.four_bit_codes`.
        normalized_text: callers give text in the tokenizer's Unicode form, to formats that do not normalise.
    """

    run: Path
    recipe: Recipe
    text_tokenizer: Tokenizer | None
    model: Model
    checkpoint: Path
    without_tokenizer: bool = False
    method: Method = "auto"
    normalized_text: bool = False

    @cached_property
    def four_bits(self) -> Coded:
        """The source model of an export with codes of four bits, for formats with positive scales."""
        return four_bit_codes(self.model, self.recipe, lambda: self.data, self.method)  # type: ignore[arg-type]

    @cached_property
    def four_bits_signed(self) -> Coded:
        """The source model of an export with codes of four bits, for formats that take negative scales."""
        return four_bit_codes(self.model, self.recipe, lambda: self.data, self.method, negative=True)  # type: ignore[arg-type]

    @cached_property
    def as_trained(self) -> Any:
        """The source model of an export as it computed in training where the run rounds to integers; else `model`
        itself."""
        policy = Policy.from_section(self.recipe.precision, "cpu")
        if not policy.rounds_to_integers:
            return self.model
        model = copy.deepcopy(self.model)
        convert(model, in_fp32(policy))  # type: ignore[arg-type]
        return model.eval()  # type: ignore[attr-defined]

    @cached_property
    def trained_in_int8(self) -> bool:
        """True if the rules of an export's source run round weights to eight bits."""
        return trained_codes(self.model, self.recipe, 8).trained  # type: ignore[arg-type]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of an export's source model, where it reads text."""
        assert self.text_tokenizer is not None
        return self.text_tokenizer

    @property
    def reads_images(self) -> bool:
        """True if the source model of an export classifies images; else it reads text."""
        return self.task == "image_classification"

    @cached_property
    def config_keys(self) -> dict[str, Any]:
        """The keys that an export's source run adds to config.json of its model's folder."""
        return config_keys(self.recipe, self.text_tokenizer, None if self.reads_images else self.text_rules)

    @cached_property
    def text_rules(self) -> TextRules:
        """Begin, end and chat template of every artefact of an export's source.

        Raises:
            DataError: files beside the loaded weights that cannot be read.
        """
        return TextRules.of(self.recipe, self.run, self.tokenizer)

    @cached_property
    def data(self) -> Prepared:
        """The data of an export's source run, prepared or found prepared: to calibrate on, and the held-out rows of the
        proof.

        Raises:
            DataError: the source is gone.
        """
        return prepare_data(self.recipe)

    @property
    def task(self) -> str:
        """The task of an export's source model: causal_lm, masked_lm or image_classification."""
        return self.recipe.model.task
