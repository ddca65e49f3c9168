"""The optimizer that a recipe asks for."""

from torch import nn

from tilewright.core.config.recipe import OptimSection
from tilewright.core.errors import ConfigError
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon
from tilewright.optim.param_groups import decay_groups, muon_groups


def make_optimizer(section: OptimSection, model: nn.Module, kernels: Kernels, seed: int) -> DeepSeekAdam:
    """Over all trainable parameters of a model.

    Args:
        section: the recipe's `[optim]`.
        model: converted, its parameters real or on meta.
        kernels: implementations of the updates.
        seed: of the stochastic rounding.

    Raises:
        ConfigError: Muon for a model that has no matrices.
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
    if section.kind == "adamw":
        return DeepSeekAdam(decay_groups(model, section.weight_decay), **common)
    matrices = [matrix for matrix in hidden_matrices(model) if matrix.requires_grad]
    if not matrices:
        raise ConfigError(
            "Model has no matrices for Muon",
            got=f"{sum(1 for _ in model.parameters())} parameters, none of which is a trained matrix of a hidden layer",
            need="linear layers between embedding and output head",
            try_='optim.kind = "adamw"',
        )
    groups = muon_groups(model, matrices, section.weight_decay, stacks=True)
    return Muon(groups, momentum=section.momentum, **common)
