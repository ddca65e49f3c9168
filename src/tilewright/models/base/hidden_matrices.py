"""Which parameters are matrices of hidden layers: those that Muon updates. By structure, for any model.

A matrix is a weight that a module multiplies by: that of a linear layer, or of a module whose code multiplies by a
parameter of its own (`own_weights`), stacks of experts [E, R, C] among them. Embeddings, output heads, routers and
whatever shares their weight are not of a hidden layer; vectors, convolutions and tables that are added are no matrices.
A module that computes queries, keys and values by one weight has one matrix.
"""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.own_weights import may_multiply
from tilewright.models.base.routers import find_routers, num_experts


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the matrices of a model's hidden layers, each once, in the model's order; frozen ones too.

    Example:
        >>> blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        >>> model = nn.ModuleDict({"words": nn.Embedding(10, 8), "blocks": blocks, "head": nn.Linear(8, 10)})
        >>> [tuple(matrix.shape) for matrix in hidden_matrices(model)]
        [(8, 8), (8, 8)]
    """
    outer = {*find_heads(model), *find_routers(model)}
    outer |= {module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    not_hidden = {parameter for module in outer for parameter in module.parameters(recurse=False)}
    found = (
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter not in not_hidden and _is_matrix(module, name, parameter)
    )
    return list(dict.fromkeys(found))


def _is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, _ConvNd) or not parameter.is_floating_point():
        return False
    if parameter.ndim == 3 and num_experts(module) != parameter.shape[0]:
        return False
    return parameter.ndim in (2, 3) and (isinstance(module, nn.Linear) or may_multiply(type(module), name))
