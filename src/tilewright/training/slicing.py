"""The layer-major executor of a recipe: slices, where their parts live, what is kept to undo a step.

Called by `assemble`.
"""

from tilewright.core.config import Recipe
from tilewright.core.errors import ConfigError
from tilewright.memory.inputs import InputStore
from tilewright.memory.journal import Journal
from tilewright.memory.ledger import Ledger
from tilewright.models.contract import Model
from tilewright.models.layered import find_slices
from tilewright.models.layered_hf import layered
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.precision.weights import QuantizedWeights
from tilewright.training.layer_major_step import LayerMajorExecutor


def make_executor(
    recipe: Recipe,
    model: Model,
    optimizer: DeepSeekAdam,
    *,
    clip: GradClip,
    ledger: Ledger,
    kernels: Kernels,
    weights: QuantizedWeights,
) -> LayerMajorExecutor:
    """The executor that `[memory]` describes."""
    memory, optim = recipe.memory, recipe.optim
    view = layered(model)
    slices = find_slices(model, view, memory.group)
    lagged = optim.clip == "lagged"
    return LayerMajorExecutor(
        model,
        view,
        slices,
        optimizer,
        clip=clip,
        lagged=lagged,
        undo=Journal("host", ledger.device) if lagged and memory.undo == "journal" else None,
        device=ledger.device,
        inputs=InputStore("device", ledger.device, recipe.train.checkpoint_inputs, kernels=kernels),
        weights=weights,
        ledger=ledger,
    )


def refuse_loss_scaling(scaled: bool) -> None:
    """Slices are updated before the whole gradient is seen, so an overflow could not be told in time.

    Raises:
        ConfigError: some gradient passes through FP16.
    """
    if scaled:
        raise ConfigError(
            "The layer-major executor does not scale the loss.",
            got="a precision with gradients in FP16",
            need="formats with the range of FP32",
            try_='precision.mode = "bf16_mixed" or "fp8_tile", or memory.executor = "standard"',
            where="memory.executor",
        )
