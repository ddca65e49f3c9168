"""Predicted loss changes from the evidence that a run with a precision controller wrote down; nothing is measured.

Evidence tells the noise of each product, not what becomes of it in the model. A weight's gradient is what its product
gives, so there the share of the step that is lost is known. Noise in an output or in an input's gradient reaches other
gradients through the residual stream, which thins it; here it counts in full, for all of them. So these numbers are an
upper bound: they rank layers, and a budget on them is safe, but they are several times too large. Called by
`training.search_recorded`.

See: `sensitivity`, which measures what this bounds.
"""

import math
import statistics
from collections.abc import Collection, Mapping

from tilewright.precision.budget import Prediction, Product, standard_error
from tilewright.precision.evidence import ProductEvidence
from tilewright.precision.gemms import GEMM_NAMES
from tilewright.precision.history import History


class RecordedModel:
    """Upper bounds of predicted loss changes. What `search.SearchSpace` asks of a model of the loss.

    Args:
        history: of the run; a product's samples while it was in FP8 or was compared with it.
        numel: elements of each layer's weight.
        num_params: parameters of the model.
        slope: relative fall of the loss while the number of steps grows by a factor e, see `budget.loss_slope`.
    """

    def __init__(self, history: History, numel: Mapping[str, int], num_params: int, slope: float) -> None:
        self.slope = slope
        self.noise: dict[Product, tuple[float, ...]] = {}
        """Noise over signal of each product, sample by sample."""
        self._blur: dict[Product, tuple[float, ...]] = {}
        for layer in history.layers:
            for gemm in GEMM_NAMES:
                found = [evidence for _, evidence in history.product(layer, gemm)]
                share = numel[layer] / num_params if gemm == "wgrad" else 1.0
                self.noise[layer, gemm] = tuple(evidence.noise for evidence in found)
                self._blur[layer, gemm] = tuple(slope * share * _lost(evidence) for evidence in found)
        self.costs: dict[Product, float] = {
            product: statistics.fmean(values) if values else math.inf for product, values in self._blur.items()
        }
        """Bound of each product; infinite where it was never compared, or was not a number."""

    def predict(self, fp8: Collection[Product]) -> Prediction:
        """The bound of a policy with these products in FP8. The standard error is over samples, of each by itself."""
        change = sum(self.costs[product] for product in fp8)
        if not math.isfinite(change):
            return Prediction(math.inf, math.inf)
        errors = [standard_error(self._blur[product]) for product in fp8]
        return Prediction(change, math.hypot(*errors) if all(map(math.isfinite, errors)) else math.inf)


def _lost(evidence: ProductEvidence) -> float:
    """Share of a step along a result with this much noise: 1 - cosine. NaN where the result was not a number."""
    if math.isnan(evidence.cosine) or math.isnan(evidence.sqnr_db):
        return math.inf
    return max(0.0, 1 - evidence.cosine)
