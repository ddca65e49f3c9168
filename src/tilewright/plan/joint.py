"""One plan for everything: executor, micro-batch, formats, and for each layer where it lies and what it keeps.

For each setting of the whole model (`options.Setting`) the solver finds the fastest choices for its layers that fit at
every phase; the fastest setting wins. Formats of the optimizer change what is learned, so they are narrowed only where
the recipe leaves them open and nothing else fits. Needs no weights and no GPU. Called by `cli.plan`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.plan.ceilings import Ceilings
from tilewright.plan.classes import LayerClass, ModelShape, ShapeFinder, ranges
from tilewright.plan.fixes import changed
from tilewright.plan.moments import FRAGMENTS, HOST_PROCESS_BYTES, Base, host_base, phases
from tilewright.plan.options import (
    Choice,
    Links,
    Setting,
    choices,
    end_class,
    layer_cost,
    layer_seconds,
    state_bytes,
)
from tilewright.plan.solve import (
    Cost,
    Counts,
    Group,
    Phase,
    Problem,
    host_bytes,
    least_seconds,
    phase_bytes,
    seconds,
    solve,
)

FORMATS = (
    {"optim.moments": "bf16"},
    {"optim.moments": "8bit"},
    {"optim.master": "split24", "optim.moments": "8bit"},
    {"optim.master": "stochastic", "optim.moments": "8bit"},
)
"""What the optimizer may be narrowed to where the recipe leaves it open, the widest first."""
SMALL_LOSS_TILE = 16 * 2**20
GAP = 1e-4
"""Share of the best step time by which a plan may miss it: far below what the rates are known to."""
MOST_ROWS = 64
"""Largest micro-batch tried."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may use, and what links its places. Without a disk speed the disk is not used."""

    device: float
    host: float
    links: Links
    disk: float = 0.0


@dataclass(frozen=True)
class Row:
    """Layers of one class that are treated alike, or an end of the model (no indices)."""

    name: str
    indices: tuple[int, ...]
    choice: Choice
    cost: Cost

    @property
    def count(self) -> int:
        """Layers of the row."""
        return max(1, len(self.indices))


@dataclass(frozen=True)
class JointPlan:
    """What was decided, and what it is expected to take."""

    recipe: Recipe
    shape: ModelShape
    machine: Machine
    budget: Budget
    setting: Setting
    rows: tuple[Row, ...]
    phases: Mapping[str, Mapping[str, float]]
    """Device bytes by owner at each phase."""
    host: Mapping[str, float]
    """Host bytes by owner."""
    seconds: Mapping[str, float]
    """Of a step, by part."""
    narrowed: Mapping[str, str] = field(default_factory=dict)
    """Formats that the plan had to change, by setting."""
    notes: tuple[str, ...] = ()

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes on the device."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> float:
        """Most bytes on the device at any phase."""
        return self.phase_bytes(self.peak_phase)

    def phase_bytes(self, phase: str) -> float:
        """Device bytes of all owners at a phase."""
        return sum(self.phases[phase].values())

    @property
    def host_bytes(self) -> float:
        """Bytes on the host."""
        return sum(self.host.values())

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.recipe.train.batch_size * self.shape.seq_len

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens_per_step / self.step_s

    @property
    def disk_bytes(self) -> float:
        """Bytes in the disk tier."""
        total = 0.0
        for row in self.rows:
            parts = _bytes_of(self.shape, self.setting, row)
            total += sum(size for place, size in parts if place == "disk")
        return total

    def row_of(self, layer: int) -> Row:
        """The row of a layer by its number."""
        return next(row for row in self.rows if layer in row.indices)

    def settings(self) -> dict[str, object]:
        """The recipe's settings that say the same, as far as they can; what differs by layer is in `rows`."""
        setting = self.setting
        found: dict[str, object] = {
            "memory.executor": setting.executor,
            "train.micro_batch": setting.micro_batch,
            "memory.loss_tile": setting.loss_tile,
            "optim.moments": setting.moments,
            "optim.master": setting.master,
        }
        kinds = {row.choice.activations for row in self.rows if row.indices}
        names = {"keep": "none", "selective": "selective", "recompute": "full"}
        if setting.executor == "standard" and len(kinds) == 1:
            found["train.activation_checkpoint"] = names[kinds.pop()]
        return found


def fingerprint(shape: ModelShape) -> str:
    """What a plan was made for: the layers' structure and number, the ends, the length of rows."""
    facts = [(c.name, c.indices, c.num_parameters) for c in shape.classes]
    ends = (shape.embedding_parameters, shape.head_parameters, shape.vocab_size, shape.dim, shape.seq_len)
    return hashlib.sha256(repr((facts, ends)).encode()).hexdigest()[:16]


def _bytes_of(shape: ModelShape, setting: Setting, row: Row) -> list[tuple[str, float]]:
    """(place, bytes) of a row's parameters and states."""
    number = _parameters(shape, row)
    states = state_bytes(number, setting, shape.stored_bytes)
    return [
        (row.choice.parameters, row.count * shape.stored_bytes * number),
        (row.choice.states, row.count * states),
    ]


def _parameters(shape: ModelShape, row: Row) -> int:
    if row.indices:
        return shape.class_of(row.indices[0]).num_parameters
    return shape.embedding_parameters if row.name == "embedding" else shape.head_parameters


@dataclass(frozen=True)
class _Table:
    """A setting's groups with the choices behind each option."""

    setting: Setting
    classes: tuple[LayerClass, ...]
    options: tuple[tuple[Choice, ...], ...]
    problem: Problem


class JointPlanner:
    """Plans one recipe in several budgets; keeps shapes and tables between them.

    Args:
        recipe: the run's settings.
        vocab_size: of the tokenizer.
        machine: where it would run.
        rates: measured or published.
        open_formats: settings of `FORMATS` that may be changed.
        notes: what the caller knows of the rates.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        machine: Machine,
        rates: Ceilings,
        open_formats: frozenset[str] = frozenset(),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.recipe = recipe
        self.vocab_size = vocab_size
        self.machine = machine
        self.rates = rates
        self.open_formats = open_formats
        self.notes = notes
        self._finder = ShapeFinder(vocab_size, machine)
        self._shapes: dict[str, ModelShape] = {}
        self._layers: int | None = None

    def with_recipe(self, recipe: Recipe) -> "JointPlanner":
        """A planner of another recipe for the same machine."""
        other = JointPlanner(recipe, self.vocab_size, self.machine, self.rates, self.open_formats, self.notes)
        other._finder = self._finder
        return other

    def with_layers(self, num_layers: int) -> "JointPlanner":
        """A planner of the same model with another number of layers, the most frequent class taking the difference."""
        other = self.with_recipe(self.recipe)
        other._shapes, other._layers = self._shapes, num_layers
        return other

    def shape(self, recipe: Recipe) -> ModelShape:
        """The model's shape with the recipe's formats."""
        if recipe.optim.master not in self._shapes:
            self._shapes[recipe.optim.master] = self._finder.find(recipe)
        found = self._shapes[recipe.optim.master]
        return found if self._layers is None else _resized(found, self._layers)

    def plan(self, budget: Budget) -> JointPlan | None:
        """The fastest plan within a budget; None where nothing fits."""
        for recipe, narrowed in self._recipes():
            best: tuple[float, _Table, Counts] | None = None
            shape = self.shape(recipe)
            for setting in _settings(recipe, self.machine):
                if best is not None and setting.loss_tile < best[1].setting.loss_tile:
                    break  # smaller tiles come last: they save memory and no time
                table = self._table(recipe, shape, setting, budget)
                head = sum(self._head_seconds(shape, setting).values())
                if best is not None and head + least_seconds(table.problem) >= best[0]:
                    continue
                counts = solve(table.problem, gap=GAP)
                if counts is None:
                    continue
                total = head + seconds(table.problem, counts)
                if best is None or total < best[0] * (1 - 1e-9):
                    best = (total, table, counts)
            if best is not None:
                return self._assembled(recipe, shape, budget, best[1], best[2], narrowed)
        return None

    def smallest(self, budget: Budget) -> JointPlan | None:
        """The plan with the least device memory within the host's budget; None where the host's is too small."""
        best: tuple[float, JointPlan] | None = None
        for recipe, narrowed in self._recipes():
            shape = self.shape(recipe)
            for setting in _settings(recipe, self.machine):
                if setting.micro_batch > 1:
                    continue
                table = self._table(recipe, shape, setting, budget)
                counts = solve(table.problem, smallest=True, gap=GAP)
                if counts is None:
                    continue
                found = self._assembled(recipe, shape, budget, table, counts, narrowed)
                if best is None or found.peak_bytes < best[0]:
                    best = (found.peak_bytes, found)
        return best[1] if best else None

    def _recipes(self) -> Iterator[tuple[Recipe, dict[str, str]]]:
        """The recipe, and then the recipe with fewer bits where that is open."""
        yield self.recipe, {}
        order = list(FORMATS)
        now = {name: getattr(self.recipe.optim, name.partition(".")[2]) for name in ("optim.moments", "optim.master")}
        bits = {"fp32": 32, "split24": 24, "bf16": 16, "stochastic": 16, "8bit": 8}
        for formats in order:
            new = {name: value for name, value in formats.items() if bits[value] < bits[now[name]]}
            if new and set(new) <= self.open_formats and len(new) == len(formats):
                yield changed(self.recipe, new), new

    def _table(self, recipe: Recipe, shape: ModelShape, setting: Setting, budget: Budget) -> _Table:
        ends = [
            end_class(name, number, shape)
            for name, number in (("embedding", shape.embedding_parameters), ("head", shape.head_parameters))
            if number
        ]
        classes = (*shape.classes, *ends)
        options = tuple(tuple(choices(found, setting, shape, budget.links)) for found in classes)
        groups = tuple(
            Group(
                found.name,
                found.count,
                tuple(layer_cost(found, one, setting, shape, recipe, self.rates, budget.links) for one in mine),
            )
            for found, mine in zip(classes, options, strict=True)
        )
        moments = phases(shape, setting, recipe, self.machine, frozenset(found.name for found in ends))
        cpu = self.machine.device == "cpu"
        base = Base.of(shape, setting, recipe, self.machine)
        host = 0.0 if cpu else host_base(base, setting, recipe, self.machine)
        device = budget.device if cpu else budget.device * (1 - FRAGMENTS)
        limit = float("inf") if cpu else budget.host
        return _Table(setting, classes, options, Problem(groups, tuple(moments), device, limit, host, budget.disk))

    def _head_seconds(self, shape: ModelShape, setting: Setting) -> dict[str, float]:
        tokens = setting.num_micro * setting.micro_batch * shape.seq_len
        work = 6.0 * tokens * shape.dim * shape.vocab_size
        rate = self.rates.matmul_rate(shape.product_format, (shape.dim * shape.vocab_size) ** 0.5)
        logits = tokens * shape.vocab_size
        loss = logits * (2 / self.rates.exp + 4 * shape.product_bytes / self.rates.bandwidth)
        return {"head": work / rate, "loss": loss}

    def _assembled(
        self,
        recipe: Recipe,
        shape: ModelShape,
        budget: Budget,
        table: _Table,
        counts: Counts,
        narrowed: Mapping[str, str],
    ) -> JointPlan:
        setting = table.setting
        rows = tuple(_rows(table, counts))
        parts = dict(self._head_seconds(shape, setting))
        for row in rows:
            found = next(one for one in table.classes if one.name == row.name)
            args = (found, row.choice, setting, shape, recipe, self.rates, budget.links)
            for name, value in layer_seconds(*args).items():
                parts[name] = parts.get(name, 0.0) + row.count * value
        fragments = budget.device - table.problem.device_budget
        by_phase = {phase.name: _owners(phase, table, counts, shape, rows, fragments) for phase in table.problem.phases}
        host = {"process": float(HOST_PROCESS_BYTES), "checkpoint": table.problem.host_base - HOST_PROCESS_BYTES}
        places = [
            pair
            for row in rows
            for pair in zip(("parameters", "optimizer"), _bytes_of(shape, setting, row), strict=True)
        ]
        for owner, (place, size) in places:
            host[owner] = host.get(owner, 0.0) + (size if place == "host" else 0.0)
        host["inputs"] = max(0.0, host_bytes(table.problem, counts) - sum(host.values()))
        if self.machine.device == "cpu":
            host = {}
        return JointPlan(
            recipe, shape, self.machine, budget, setting, rows, by_phase, host, parts, narrowed,
            (*shape.notes, *self.notes, *_guesses(setting, budget)),
        )  # fmt: skip


def _guesses(setting: Setting, budget: Budget) -> tuple[str, ...]:
    found = ["guessed: shares of element-wise work, allocator's gaps, host memory of the process"]
    if budget.links.guessed and setting.executor == "layer_major":
        found.append(budget.links.guessed)
    if setting.executor == "layer_major":
        found.append("not in the plan: the journal of `memory.undo`")
    return tuple(found)


def _settings(recipe: Recipe, machine: Machine) -> Iterator[Setting]:
    """Everything that may be chosen for the whole model."""
    batch = recipe.train.batch_size
    rows, sizes = 1, set[int]()
    while rows <= min(batch, MOST_ROWS):
        sizes.add(rows)
        rows *= 2
    sizes.add(min(recipe.train.micro_batch, batch))
    tiles = dict.fromkeys((recipe.memory.loss_tile, min(recipe.memory.loss_tile, SMALL_LOSS_TILE)))
    refused = recipe.precision.mode in ("pure_fp16", "hybrid") or recipe.precision.moves_products
    executors: tuple[str, ...] = ("standard",) if refused else ("standard", "layer_major")
    passes = 2 if recipe.optim.clip == "exact" and recipe.optim.clip_norm > 0 else 1
    for tile in tiles:
        for executor in executors:
            for size in sorted(sizes, reverse=True):
                yield Setting(
                    executor=executor,  # type: ignore[arg-type]
                    micro_batch=size,
                    num_micro=-(-batch // size),
                    moments=recipe.optim.moments,
                    master=recipe.optim.master,
                    loss_tile=tile,
                    passes=passes,
                )


def _rows(table: _Table, counts: Counts) -> Iterator[Row]:
    """Options with their layers. What keeps more lies higher: backward lets go of it first."""
    for found, mine, group, row in zip(table.classes, table.options, table.problem.groups, counts, strict=True):
        left = sorted(found.indices)
        used = [(cost, choice, n) for cost, choice, n in zip(group.costs, mine, row, strict=True) if n]
        for cost, choice, number in sorted(used, key=lambda item: -item[0].kept):
            taken = () if found.indices == (-1,) else tuple(left[len(left) - number :])
            left = left[: len(left) - number]
            yield Row(found.name, taken, choice, cost)


def _owners(
    phase: Phase, table: _Table, counts: Counts, shape: ModelShape, rows: Sequence[Row], fragments: float
) -> dict[str, float]:
    """Device bytes of a phase by owner; `work` is what lives only while something runs."""
    found = {"parameters": 0.0, "optimizer": 0.0, "gradients": 0.0, "activations": 0.0}
    for row in rows:
        for owner, (place, size) in zip(("parameters", "optimizer"), _bytes_of(shape, table.setting, row), strict=True):
            found[owner] += size if place == "device" else 0.0
        found["gradients"] += row.count * row.cost.gradient if row.name in phase.gradients else 0.0
        found["activations"] += row.count * row.cost.kept if row.name in phase.kept else 0.0
    total = phase_bytes(table.problem, phase, counts)
    process = table.problem.phases[0].base
    work = total - sum(found.values()) - process
    found["work"] = work if work >= 1 else 0.0
    found["process"] = process + fragments
    return found


def _resized(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same shape with another number of layers."""
    if num_layers == shape.num_layers:
        return shape
    most = max(shape.classes, key=lambda found: found.count)
    extra = num_layers - shape.num_layers
    kept = sorted(most.indices)[: max(1, most.count + extra)]
    more = tuple(range(shape.num_layers, shape.num_layers + max(0, extra)))
    classes = tuple(replace(found, indices=(*kept, *more)) if found is most else found for found in shape.classes)
    return replace(shape, classes=classes)


def largest(planner: JointPlanner, budget: Budget) -> JointPlan | None:
    """The plan of the deepest model of this shape that fits; None where not even one layer a class does."""
    shape = planner.shape(planner.recipe)
    least = len(shape.classes)
    low, high = least - 1, max(2 * shape.num_layers, least)
    found: dict[int, JointPlan] = {}

    def fits(num_layers: int) -> bool:
        plan = planner.with_layers(num_layers).plan(budget)
        if plan is not None:
            found[num_layers] = plan
        return plan is not None

    while high < 4096 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return found.get(low)


def pareto(planner: JointPlanner, budget: Budget, points: int = 6) -> list[JointPlan]:
    """Fastest plans at several device budgets, from the least that fits to the budget itself."""
    least = planner.smallest(budget)
    found: list[JointPlan] = []
    if least is None:
        return found
    low = min(least.peak_bytes / (1 - FRAGMENTS) * 1.01, budget.device)
    for i in range(points):
        device = low + (budget.device - low) * i / (points - 1)
        plan = planner.plan(replace(budget, device=device))
        if plan is not None:
            found.append(plan)
    return found


def describe(row: Row) -> str:
    """The layers of a row as people write them."""
    return f"{row.name} {ranges(row.indices)}" if row.indices else row.name
