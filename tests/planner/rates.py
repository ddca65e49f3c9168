"""Made-up ceilings with round numbers, so that seconds can be computed by hand."""

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.planner.cost.storage_links import unmeasured
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner

FORMATS = ("fp32", "tf32", "bf16", "fp16")
GIB = 2**30


def make_rates(**changes) -> Ceilings:
    fields = {
        "key": "made up",
        "matmul": {fmt: {256: 1e12, 2048: 1e12} for fmt in FORMATS},
        "start": {fmt: {} for fmt in FORMATS},
        "attention": dict.fromkeys(FORMATS, 1e11),
        "loss": dict.fromkeys(FORMATS, 1e9),
        "elementwise": dict.fromkeys(FORMATS, 1e10),
        "adam": {"fp32": 1e9, "bf16": 5e8, "8bit": 5e8},
        "bandwidth": 1e10,
        "exp": 1e9,
        "threads": 2,
        "busy": 1.0,
        "measured_s": 0.0,
    }
    return Ceilings(**(fields | changes))


def make_machine(memory: int = 64 * GIB, device: str = "cpu", compiler: str | None = None) -> Machine:
    """A machine by its facts alone. Without a compiler nothing is compiled."""
    return Machine(
        device=device, device_name="made up", capability=(9, 0) if device == "cuda" else None,
        device_memory_bytes=memory, host_memory_bytes=memory, physical_cores=2,
        cpu_features=frozenset(), cxx_compiler=compiler, versions={},
    )  # fmt: skip


def make_recipe(**sections) -> Recipe:
    base = {"model": {"dim": 64, "num_layers": 3, "num_heads": 2}, "data": {"seq_len": 128, "vocab_size": 512}}
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    return Recipe.model_validate(merged)


def make_plan(recipe: Recipe, vocab_size: int, machine: Machine, rates: Ceilings) -> Plan:
    """A recipe as it stands, links at guessed speeds."""
    device = float(recipe.plan.device_memory or machine.device_memory_bytes)
    budget = Budget(device, float(machine.host_memory_bytes), unmeasured(machine), float("inf"))
    return Planner(recipe, vocab_size, machine, rates).as_it_stands(budget)
