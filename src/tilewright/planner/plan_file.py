"""The plan file: what `plan --out` writes and a run can execute. TOML, checked when it is read.

    format = 3
    [model]     family, parameters, layers, fingerprint: a plan is for one model and one length of rows
    [machine]   name, device, device_bytes, host_bytes, disk_bytes: the budgets it was made for
    [settings]  settings of the recipe that the plan decides, by section.field
    [[layers]]  class, layers ("0-15, 20"), parameters, states, inputs, activations, mlp_chunks,
                attention_block
    [[ends]]    name ("embedding" or "head"), parameters, states
    [predicted] step_s, device_peak_bytes, peak_phase, host_bytes

Every layer is in exactly one `[[layers]]`.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomlkit

from tilewright.core.errors import ConfigError, FitError
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import LayerMemory, MemoryPlan, plan_text, unreadable_plan
from tilewright.core.units import format_bytes, ranges
from tilewright.planner.model.constraints import BESIDE
from tilewright.planner.model.model_shape import ModelShape
from tilewright.planner.plan import Plan

FORMAT = 3
SETTINGS = frozenset(
    (
        *(
            "memory.executor",
            "memory.loss_chunk_bytes",
            "memory.offload_params",
            "memory.offload_optimizer",
            "memory.offload_activations",
        ),
        *("memory.mlp_chunks", "memory.attention_block"),
        *("train.micro_batch_size", "train.activation_checkpoint", "optim.moments", "optim.master_weights"),
        *BESIDE,
    )
)
"""What a plan may say of a recipe."""


@dataclass(frozen=True)
class PlanFile:
    """A plan as read. `layers`: the choice of each layer, by number."""

    path: Path
    family: str
    fingerprint: str
    num_parameters: int
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    layers: tuple[LayerMemory, ...]
    ends: Mapping[str, LayerMemory]
    predicted: Mapping[str, Any]

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan of the plan file, for executors."""
        return MemoryPlan(layers=self.layers, **self.ends)

    def check_machine(self, machine: Machine) -> None:
        """Check that the plan file is of this kind of machine; raise ConfigError where it is of another one."""
        if self.machine["device"] != machine.device:
            raise ConfigError(
                "Plan was made for another machine",
                got=f"a plan for {self.machine['name']} ({self.machine['device']})",
                need=f"one for {machine.device_name} ({machine.device})",
                try_='tilewright plan RECIPE --out FILE on this machine, or memory.plan = "auto"',
                where=str(self.path),
            )

    def check_fit(self, expected: Plan) -> None:
        """Raise FitError where the machine has not the memory that the plan file needs.

        Args:
            expected: what the plan takes here.
        """
        budget = expected.budget
        short = []
        if expected.peak_bytes > budget.device:
            short.append(f"{format_bytes(expected.peak_bytes)} on the device, which has {format_bytes(budget.device)}")
        if expected.host_bytes > budget.host:
            short.append(f"{format_bytes(expected.host_bytes)} on the host, which has {format_bytes(budget.host)}")
        if expected.disk_bytes > budget.disk:
            short.append(f"{format_bytes(expected.disk_bytes)} on disk, where {format_bytes(budget.disk)} are free")
        if short:
            made = self.machine
            raise FitError(
                "Plan does not fit this machine",
                got=f"it takes {' and '.join(short)}",
                need=f"a machine like the one it was made for: {made['name']}, {format_bytes(made['device_bytes'])} on "
                "the device",
                try_='memory.plan = "auto", or tilewright plan RECIPE --out FILE on this machine',
                where=str(self.path),
            )

    def check(self, shape: ModelShape) -> None:
        """Check that the plan file is of this model; raise ConfigError where it is of another one."""
        if self.fingerprint != fingerprint(shape):
            raise ConfigError(
                "Plan was made for another model",
                got=f"a plan for {self.family}, {self.num_parameters} parameters in {len(self.layers)} layers",
                need=f"one for {shape.family}, {shape.num_parameters} parameters in {shape.num_layers} layers, rows of "
                f"{shape.seq_len} tokens",
                try_="tilewright plan RECIPE --out FILE, which makes one",
                where=str(self.path),
            )


def fingerprint(shape: ModelShape) -> str:
    """The fingerprint of the shape that a plan file was made for: the layers' structure and number, the ends, the
    length of rows."""
    facts = [(c.name, c.indices, c.num_parameters) for c in shape.classes]
    ends = (shape.embedding.count, shape.head.count, shape.vocab_size, shape.dim, shape.seq_len)
    return hashlib.sha256(repr((facts, ends)).encode()).hexdigest()[:16]


def to_toml(plan: Plan) -> str:
    """The text of a plan file."""
    document = tomlkit.document()
    # In the order of the docstring above: what it is for, what it decides, what it expects.
    document.add(tomlkit.comment("Made by `tilewright plan --out`. Predicted numbers are in [predicted]."))
    document["format"] = FORMAT
    document["model"] = {
        "family": plan.shape.family,
        "parameters": plan.shape.num_parameters,
        "layers": plan.shape.num_layers,
        "fingerprint": fingerprint(plan.shape),
    }
    document["machine"] = {
        "name": plan.machine.device_name,
        "device": plan.machine.device,
        "device_bytes": int(plan.budget.device),
        "host_bytes": int(plan.budget.host),
        "disk_bytes": int(plan.budget.disk),
    }
    document["settings"] = plan.settings()
    # Layers have a whole memory plan; embedding and head only places.
    layers, ends = tomlkit.aot(), tomlkit.aot()
    for row in plan.rows:
        if row.indices:
            named = {"class": row.name, "layers": ranges(row.indices)}
            layers.append(tomlkit.item(named | dict(vars(row.choice))))
        else:
            places = {"parameters": row.choice.parameters, "states": row.choice.states}
            ends.append(tomlkit.item({"name": row.name} | places))
    document["layers"], document["ends"] = layers, ends
    document["predicted"] = {
        "step_s": float(f"{plan.step_s:.4g}"),
        "device_peak_bytes": int(plan.peak_bytes),
        "peak_phase": plan.peak_phase,
        "host_bytes": int(plan.host_bytes),
    }
    return tomlkit.dumps(document)


def is_plan_file(path: str | Path) -> bool:
    """True if a file looks like a plan file, and not like a recipe."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False
    return "fingerprint" in found.get("model", {})


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan file.

    Raises:
        ConfigError: no such file, not a plan, written by another version, or a layer missing or named twice.
    """
    path = Path(path)
    # A file may have been edited: all of it is checked here, so that a run fails before its model is loaded.
    try:
        raw = tomllib.loads(plan_text(path))
        if raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format')!r}, not {FORMAT}")
        # 1. Each layer once, and all of them.
        layers: dict[int, LayerMemory] = {}
        for row in raw["layers"]:
            for index in _numbers(row["layers"]):
                if index in layers:
                    raise ValueError(f"layer {index} is there twice")
                layers[index] = _memory_plan(row)
        if sorted(layers) != list(range(raw["model"]["layers"])):
            raise ValueError(f"layers {ranges(sorted(layers))}, not all of 0-{raw['model']['layers'] - 1}")
        # 2. Settings that a plan decides, and no others.
        strange = sorted(set(raw["settings"]) - SETTINGS)
        if strange:
            raise ValueError(f"[settings] holds {', '.join(strange)}, which no plan decides")
        ends = {row["name"]: _memory_plan(row) for row in raw.get("ends", [])}
        if set(ends) - {"embedding", "head"}:
            raise ValueError(f"[[ends]] are embedding and head, not {', '.join(ends)}")
        made = {name: raw["machine"][name] for name in ("name", "device", "device_bytes", "host_bytes", "disk_bytes")}
        return PlanFile(
            path=path,
            family=raw["model"]["family"],
            fingerprint=raw["model"]["fingerprint"],
            num_parameters=raw["model"]["parameters"],
            machine=made,
            settings=raw["settings"],
            layers=tuple(layers[index] for index in sorted(layers)),
            ends=ends,
            predicted=raw["predicted"],
        )
    except (tomllib.TOMLDecodeError, ValueError, KeyError, TypeError) as error:
        raise unreadable_plan(path, f"{type(error).__name__}: {error}") from error


def _numbers(text: str) -> list[int]:
    """Numbers of layers from the ranges of a plan file; the opposite of `ranges`."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def _memory_plan(row: Mapping[str, Any]) -> LayerMemory:
    """The memory plan of a plan file's row for its layers.

    Raises:
        ValueError: a word or number that means nothing.
    """
    names = {field.name for field in fields(LayerMemory)}
    return LayerMemory(**{name: value for name, value in row.items() if name in names})
