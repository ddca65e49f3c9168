"""Train large transformers on little hardware, and show the numbers.

The names below are imported when they are first used, so that `import tilewright` stays fast and
does not import torch.
"""

import importlib

__version__ = "0.1.0"

# Public name -> module that has it. The frozen surface: a change here goes into CHANGELOG.md.
_PUBLIC = {
    "CheckpointError": "tilewright.core.errors",
    "ConfigError": "tilewright.core.errors",
    "ControllerSettings": "tilewright.precision.controller.controller_settings",
    "ConversionReport": "tilewright.precision.policy.precision_report",
    "DataError": "tilewright.core.errors",
    "Decoder": "tilewright.models.decoder.decoder",
    "DecoderConfig": "tilewright.models.decoder.config",
    "DeepSeekAdam": "tilewright.optim.adam",
    "DropReason": "tilewright.data.common.record_filter",
    "DynamicScaler": "tilewright.precision.loss_scaling.loss_scale",
    "FP8Quantizer": "tilewright.precision.quantizers.fp8",
    "FitError": "tilewright.core.errors",
    "GradClip": "tilewright.optim.clip",
    "HardwareError": "tilewright.core.errors",
    "IntegerQuantizer": "tilewright.precision.quantizers.integers",
    "Kernels": "tilewright.ops.kernels",
    "LRSchedule": "tilewright.optim.schedule",
    "Loaded": "tilewright.core.config.load",
    "Machine": "tilewright.core.hardware",
    "Muon": "tilewright.optim.muon",
    "NumericsError": "tilewright.core.errors",
    "Plan": "tilewright.planner.plan",
    "Policy": "tilewright.precision.policy.policy",
    "PrecisionController": "tilewright.precision.controller.precision_controller",
    "QuantizedWeights": "tilewright.precision.float8.weight_cache",
    "Recipe": "tilewright.core.config.recipe",
    "Rule": "tilewright.precision.policy.policy",
    "RecordFilter": "tilewright.data.common.record_filter",
    "RunResult": "tilewright.training.run",
    "StepHook": "tilewright.training.hooks.step_hook",
    "TilewrightError": "tilewright.core.errors",
    "UnknownFitError": "tilewright.core.errors",
    "add_lora": "tilewright.precision.lora.lora",
    "convert": "tilewright.precision.convert",
    "detect_machine": "tilewright.core.hardware",
    "dynamic_quantize": "tilewright.formats.dynamic_range",
    "evaluating": "tilewright.precision.convert",
    "explain": "tilewright.precision.convert",
    "fp8_choice": "tilewright.core.hardware",
    "load_adapter": "tilewright.precision.lora.peft_io",
    "load_fp8_weights": "tilewright.precision.lora.lora",
    "load_lora_decoder": "tilewright.precision.lora.lora",
    "load_recipe": "tilewright.core.config.load",
    "merge_lora": "tilewright.precision.lora.lora",
    "plan": "tilewright.api",
    "save_adapter": "tilewright.precision.lora.peft_io",
    "set_mode": "tilewright.precision.convert",
    "train": "tilewright.api",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # pyright: ignore[reportUnsupportedDunderAll]  # the table is the list


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
