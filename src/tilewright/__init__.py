"""Train large transformers on little hardware, and show the numbers.

The names below are imported when they are first used, so that `import tilewright` stays fast and
does not import torch.
"""

import importlib

__version__ = "0.1.0"

# Public name -> module that has it. The frozen surface: a change here goes into CHANGELOG.md.
_PUBLIC = {
    "ControllerSettings": "tilewright.precision.controller_settings",
    "Decoder": "tilewright.models.decoder",
    "DecoderConfig": "tilewright.models.config",
    "DeepSeekAdam": "tilewright.optim.adam",
    "DynamicScaler": "tilewright.precision.loss_scale",
    "FP8Quantizer": "tilewright.precision.fake_quant",
    "GradClip": "tilewright.optim.clip",
    "Kernels": "tilewright.ops.kernels",
    "LRSchedule": "tilewright.optim.schedule",
    "Policy": "tilewright.precision.policy",
    "PrecisionController": "tilewright.precision.control",
    "QuantizedWeights": "tilewright.precision.weights",
    "Recipe": "tilewright.core.config",
    "Rule": "tilewright.precision.policy",
    "TilewrightError": "tilewright.core.errors",
    "convert": "tilewright.precision.public",
    "detect_machine": "tilewright.core.hardware",
    "evaluating": "tilewright.precision.convert",
    "explain": "tilewright.precision.convert",
    "load_recipe": "tilewright.core.load",
    "set_mode": "tilewright.precision.convert",
    "train": "tilewright.api",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
