"""Optional second homes of the metrics: TensorBoard, trackio, wandb. Thin: they are reported scalars and nothing else.

metrics.jsonl stays the source of truth. The packages are imported when a run starts, so that a missing one
stops it at once and not at its first log line.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.core.errors import ConfigError

_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


class TensorBoardSink:
    """Event files in the run folder, under `tensorboard/`."""

    def __init__(self, module: ModuleType, run_dir: Path) -> None:
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """wandb, and trackio, whose interface is the same."""

    def __init__(self, module: ModuleType, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project="tilewright", name=run_dir.name, config=dict(config))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()


Sink = TensorBoardSink | WandbSink
"""Receives the scalars of a metrics row."""


def open_sinks(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> list[Sink]:
    """The sinks a recipe asks for, ready.

    Raises:
        ConfigError: a package is not installed.
    """
    modules = [(name, _import(name)) for name in names]
    return [
        TensorBoardSink(module, run_dir) if name == "tensorboard" else WandbSink(module, run_dir, config)
        for name, module in modules
    ]


def scalars_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a metrics row, nested ones under `outer/inner`; `step` left out.

    Example:
        >>> scalars_of({"step": 3, "loss": 2.5, "skipped": None, "eval": {"code": {"ppl": 9.0}}})
        {'loss': 2.5, 'eval/code/ppl': 9.0}
    """
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= scalars_of(value, f"{prefix}{name}/")
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or f"{prefix}{name}" == "step":
            continue
        elif math.isfinite(value):
            flat[prefix + name] = float(value)
    return flat


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise ConfigError(
            f"Metrics sink {name} is not installed",
            got=str(error),
            need=f"the package {name}",
            try_=f'pip install "tilewright[{"track" if name == "trackio" else name}]"',
            where="log.sinks",
        ) from error
