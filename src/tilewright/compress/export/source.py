"""What is exported: the model of a run in FP32, its tokenizer and recipe, and the data that it is proven on."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilewright.compress.export.codes import Coded, Method, four_bit_codes
from tilewright.core.config.recipe import Recipe
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.models.base.protocols import Model
from tilewright.training.components.dataset import Prepared, prepare_data


@dataclass(frozen=True)
class ExportSource:
    """A run, opened to be exported.

    Args:
        run: its folder.
        recipe: the resolved one.
        tokenizer: of the run.
        model: FP32, on the CPU, in evaluation mode; adapters are merged.
        checkpoint: where the weights are from.
        without_tokenizer: write formats that carry a tokenizer without one where theirs cannot be ours.
        method: how weights become four bits, see `codes.four_bit_codes`.
    """

    run: Path
    recipe: Recipe
    tokenizer: Tokenizer
    model: Model
    checkpoint: Path
    without_tokenizer: bool = False
    method: Method = "auto"

    @cached_property
    def four_bits(self) -> Coded:
        """The model with codes of four bits, found once for all targets that hold them."""
        return four_bit_codes(self.model, self.recipe, lambda: self.data, self.method)  # type: ignore[arg-type]

    @cached_property
    def data(self) -> Prepared:
        """The run's data, prepared or found prepared: to calibrate on, and the held-out rows of the proof.

        Raises:
            DataError: the source is gone.
        """
        return prepare_data(self.recipe)

    @property
    def task(self) -> str:
        """causal_lm, masked_lm or image_classification."""
        return self.recipe.model.task
