"""How many parameters a model has, and how many of them are trained."""

from torch import nn

from tilewright.core.units import format_count
from tilewright.ops.base.codes import named_codes


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Trained and in total; a matrix that two modules share counts once. Frozen weights kept as FP8 codes count too.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> _ = model.weight.requires_grad_(False)
        >>> num_parameters(model)
        (2, 8)
    """
    sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    codes = sum(codes.numel() for name, codes in named_codes(model) if name.rpartition(".")[2] == "weight")
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes) + codes


def in_words(trained: int, total: int) -> str:
    """Both numbers where they differ.

    Example:
        >>> in_words(5_870_000, 5_870_000), in_words(45_000, 5_870_000)
        ('5.87M parameters', '45k of 5.87M parameters trained')
    """
    if trained == total:
        return f"{format_count(total)} parameters"
    return f"{format_count(trained)} of {format_count(total)} parameters trained"
