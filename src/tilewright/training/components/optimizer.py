"""The optimizer that a recipe asks for."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tilewright.core.config.recipe import OptimSection
from tilewright.core.errors import ConfigError
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon
from tilewright.optim.param_groups import decay_groups, muon_groups


def make_optimizer(
    section: OptimSection, model: nn.Module, kernels: Kernels, seed: int, numbers: Mapping[str, int] | None = None
) -> DeepSeekAdam:
    """Make the optimizer that a recipe asks for, of all trainable parameters of a model.

    Args:
        section: the recipe's `[optim]`.
        model: converted, its parameters real or on meta.
        kernels: implementations of the updates.
        seed: of the stochastic rounding.
        numbers: of the parameters in the random streams of the rounding, by name, where the model is a part of the one
            that `rounding_numbers` saw; None: their own.

    Raises:
        ConfigError: Muon for a model that has no matrices; a part of a model may have none.
    """
    common = {
        "lr": section.lr,
        "betas": section.betas,
        "eps": section.eps,
        "moments": section.moments,
        "master": section.master_weights,
        "kernels": kernels,
        "seed": seed,
    }
    if numbers is not None:
        common["numbers"] = {param: numbers[name] for name, param in model.named_parameters() if name in numbers}
    groups = _groups(section, model, part=numbers is not None)
    if section.kind == "adamw":
        return DeepSeekAdam(groups, **common)
    return Muon(groups, momentum=section.momentum, **common)


def rounding_numbers(section: OptimSection, model: nn.Module) -> dict[str, int]:
    """Number the trainable parameters by name, for the random streams of stochastic rounding: a part of the model then
    rounds as the whole does.

    Args:
        section: the recipe's `[optim]`.
        model: all of it, converted, its parameters real or on meta.
    """
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in _groups(section, model, part=False) for param in group["params"]]
    return {names[param]: number for number, param in enumerate(params)}


def _groups(section: OptimSection, model: nn.Module, *, part: bool) -> list[dict[str, Any]]:
    if section.kind == "adamw":
        return decay_groups(model, section.weight_decay)
    matrices = [matrix for matrix in hidden_matrices(model) if matrix.requires_grad]
    if not matrices and not part:
        raise ConfigError(
            "Model has no matrices for Muon",
            got=f"{sum(1 for _ in model.parameters())} parameters, none of which is a trained matrix of a hidden layer",
            need="linear layers between embedding and output head",
            try_='optim.kind = "adamw"',
        )
    return muon_groups(model, matrices, section.weight_decay, stacks=True)
