"""Parameters that a transformers model's author keeps in FP32 whatever is asked for."""

import re

from torch import nn


def kept_fp32(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that `_keep_in_fp32_modules_strict` of a model or a part of one means, and the pattern of each.

    transformers loads these in FP32 also where a model is asked for in 16 bits. (`_keep_in_fp32_modules` is about the
    range of FP16, which is the loss scale's affair.)

    Example:
        >>> model = nn.ModuleDict({"gate": nn.Linear(2, 2, bias=False), "up": nn.Linear(2, 2, bias=False)})
        >>> model._keep_in_fp32_modules_strict = ["gate.weight"]
        >>> list(kept_fp32(model).values())
        ['gate.weight']
    """
    found: dict[nn.Parameter, str] = {}
    for part in model.modules():
        for pattern in sorted(vars(part).get("_keep_in_fp32_modules_strict") or ()):
            expression = re.compile(pattern.replace("*", ".*"))
            found |= {value: pattern for name, value in part.named_parameters() if expression.search(name)}
    return found
