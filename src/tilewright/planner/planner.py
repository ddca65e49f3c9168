"""One plan for everything: executor, micro-batch, formats, and for each layer where it lies and what it keeps.

For each setting of the whole model (`choices.GlobalConfig`) the solver finds the fastest choices for its layers that
fit at every phase; the fastest setting wins. Formats of the optimizer change what is learned, so they are narrowed only
where the recipe leaves them open and nothing else fits. Needs no weights and no GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.core.config.change_recipe import CPU_LOSS_CHUNK, changed
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.integer_program import OutOfTime
from tilewright.core.memory_plan import LayerMemory, MemoryPlan, memory_plan_of
from tilewright.planner.cost.layer_choices import NOTHING_FIXED, GlobalConfig, choices, settings_of
from tilewright.planner.cost.layer_cost import GemmCost, end_class, layer_cost, layer_operations
from tilewright.planner.cost.mode_speed import slow_mode_notes
from tilewright.planner.cost.operations import HEAD, Operation, computed, total_s
from tilewright.planner.cost.owners import on_host, owners_at
from tilewright.planner.cost.plan_rows import PlanRow, documents_notes, recomputed
from tilewright.planner.cost.rank_traffic import communication, cut_traffic
from tilewright.planner.cost.solve_layers import (
    Answer,
    ChoiceGroup,
    Counts,
    PlanProblem,
    least_seconds,
    left_out_note,
    seconds,
    solve,
    stopped_note,
)
from tilewright.planner.cost.step_phases import (
    CHECKPOINT,
    EVALUATE,
    FRAGMENTS,
    FixedBytes,
    OffloadFlags,
    host_base,
    phases,
    rollback_bytes,
)
from tilewright.planner.cost.teacher_cost import head_parts_s, teacher_s
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.model_shape import LayerClass, ModelShape
from tilewright.planner.plan import Budget, Plan

FORMATS = (
    {"optim.moments": "bf16"},
    {"optim.moments": "8bit"},
    {"optim.master_weights": "split24", "optim.moments": "8bit"},
    {"optim.master_weights": "stochastic", "optim.moments": "8bit"},
)
"""What the optimizer may be narrowed to where the recipe leaves it open, the widest first."""
FORMAT_FIELDS = frozenset(("optim.moments", "optim.master_weights"))
GAP = 1e-4
"""Share of the best step time by which a plan may miss it: far below what the rates are known to."""


@dataclass(frozen=True)
class _Table:
    """A setting's groups with the choices behind each option."""

    recipe: Recipe
    """With the formats of `narrowed`."""
    narrowed: Mapping[str, str]
    shape: ModelShape
    budget: Budget
    setting: GlobalConfig
    classes: tuple[LayerClass, ...]
    options: tuple[tuple[LayerMemory, ...], ...]
    problem: PlanProblem
    host: Mapping[str, float]
    """Bytes of the host that no choice changes, by owner."""

    @property
    def possible(self) -> bool:
        """True if the planner's executor can do what is fixed, and has layers to run one after the other."""
        return all(self.options) and (bool(self.shape.classes) or self.setting.can.whole_model)


def narrower(recipe: Recipe) -> Iterator[dict[str, str]]:
    """List the formats with fewer bits than a recipe has, to which the planner may narrow: entries of `FORMATS`."""
    bits = {"fp32": 32, "split24": 24, "bf16": 16, "stochastic": 16, "8bit": 8}
    for formats in FORMATS:
        fewer = all(bits[new] < bits[getattr(recipe.optim, name.partition(".")[2])] for name, new in formats.items())
        if fewer and not any(FORMAT_FIELDS & set(one.fields) for one in conflicts(changed(recipe, formats))):
            yield formats


class Planner:
    """Plans one recipe in several budgets; keeps shapes and tables between them.

    Args:
        recipe: the run's settings.
        vocab_size: of the tokenizer.
        machine: where it would run.
        rates: measured or published.
        open_formats: settings of `FORMATS` that may be changed.
        notes: what the caller knows of the rates.
        fixed: what is chosen already.
        finder: of shapes, where other planners of this tokenizer and machine have one.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        machine: Machine,
        rates: Ceilings,
        open_formats: frozenset[str] = frozenset(),
        notes: tuple[str, ...] = (),
        fixed: Constraints = NOTHING_FIXED,
        finder: ShapeFinder | None = None,
    ) -> None:
        self.recipe = recipe
        self.vocab_size = vocab_size
        self.machine = machine
        self.rates = rates
        self.open_formats = open_formats
        self.notes = notes
        self.fixed = fixed
        self._finder = finder or ShapeFinder(vocab_size, machine)
        self._shapes: dict[str, ModelShape] = {}
        self._layers: int | None = None

    def with_recipe(self, recipe: Recipe, vocab_size: int | None = None) -> "Planner":
        """A planner of another recipe, and another tokenizer, for the same machine."""
        finder = self._finder if vocab_size in (None, self.vocab_size) else None
        size, notes = vocab_size or self.vocab_size, self.notes
        return Planner(recipe, size, self.machine, self.rates, self.open_formats, notes, self.fixed, finder)

    def with_fixed(self, fixed: Constraints, open_formats: frozenset[str] = frozenset()) -> "Planner":
        """A planner of the same recipe that may choose less, or more."""
        other = self.with_beside({})
        other.fixed, other.open_formats = fixed, open_formats
        return other

    def with_beside(self, settings: Mapping[str, Any]) -> "Planner":
        """A planner of the same recipe with other settings of what is beside the steps (`constraints.BESIDE`)."""
        other = self.with_recipe(changed(self.recipe, dict(settings)))
        other._shapes, other._layers = self._shapes, self._layers
        return other

    def with_layers(self, layers: int) -> "Planner":
        """A planner of the same model with another number of layers, the most frequent class taking the difference."""
        other = self.with_beside({})
        other._layers = layers
        return other

    def with_shape(self, shape: ModelShape) -> "Planner":
        """A planner of the same recipe whose model has this shape, in the recipe's formats."""
        other = self.with_beside({})
        other._shapes = {self.recipe.optim.master_weights: shape}
        return other

    def shape(self, recipe: Recipe) -> ModelShape:
        """The model's shape with the planner's recipe and its formats."""
        if recipe.optim.master_weights not in self._shapes:
            self._shapes[recipe.optim.master_weights] = self._finder.find(recipe)
        found = self._shapes[recipe.optim.master_weights]
        if self._layers is not None:
            return found.resized(self._layers)
        return found.split(self.fixed) if self.fixed.layers else found

    def plan(self, budget: Budget) -> Plan | None:
        """The planner's fastest plan within a budget, `plan.margin` left free; None where nothing fits.

        Raises:
            UnknownFitError: the model cannot be traced.
            OutOfTime: the solver was stopped and had found nothing, and where it had an end, nothing fits.
        """
        for recipe, narrowed in self._recipes():
            best: tuple[float, _Table, Answer] | None = None
            late: list[OutOfTime] = []
            shape = self.shape(recipe).known()
            for setting in settings_of(recipe, self.fixed):
                if best is not None and setting.loss_chunk_bytes < min(
                    best[1].setting.loss_chunk_bytes, CPU_LOSS_CHUNK
                ):
                    break  # the smallest tiles come last: they save little memory and no time
                table = self._table(recipe, narrowed, shape, setting, budget)
                if not table.possible:
                    continue
                head = total_s(self._around(table))
                if best is not None and head + least_seconds(table.problem) >= best[0]:
                    continue
                try:
                    answer = solve(table.problem, gap=GAP)
                except OutOfTime as error:
                    late.append(error)
                    continue
                if answer is None:
                    continue
                total = head + seconds(table.problem, answer.counts)
                if best is None or total < best[0] * (1 - 1e-9):
                    best = (total, table, answer)
            if best is not None:
                found = self._settled(self._decided(*best[1:], "faster", late), budget)
                if found is not None:
                    return found
            if late:  # something of these formats may fit
                raise late[0]
        return None

    def _settled(self, found: Plan, budget: Budget) -> Plan | None:
        """The planner's plan with a disk on which no layer group is stored, with the rollback buffer and the
        checkpoint's copy where they are then; None where that does not fit."""
        if budget.links.disk is None or any("disk" in (row.choice.parameters, row.choice.states) for row in found.rows):
            return found
        without = self.plan(replace(budget, links=replace(budget.links, disk=None), disk=0.0))
        if without is not None:
            return without
        real = self.with_recipe(found.recipe).priced(found.setting, found.memory_plan, budget)
        real = replace(real, narrowed=found.narrowed, decided=True)
        return real if real.least_device <= budget.device else None

    def smallest(self, budget: Budget) -> Plan | None:
        """The planner's plan with the least device memory within the host's budget; None where the host's is too small.

        Raises:
            OutOfTime: the solver was stopped and had found nothing, and where it had an end, nothing fits.
        """
        best: tuple[float, Plan] | None = None
        late: list[OutOfTime] = []
        for recipe, narrowed in self._recipes():
            shape = self.shape(recipe).known()
            settings = list(settings_of(recipe, self.fixed))
            fewest = min(setting.micro_batch_size for setting in settings)
            for setting in (one for one in settings if one.micro_batch_size == fewest):
                table = self._table(recipe, narrowed, shape, setting, budget)
                if not table.possible:
                    continue
                try:
                    answer = solve(table.problem, smallest=True, gap=GAP)
                except OutOfTime as error:
                    late.append(error)
                    continue
                if answer is None:
                    continue
                found = self._decided(table, answer, "smaller", late)
                if best is None or found.peak_bytes < best[0]:
                    best = (found.peak_bytes, found)
        if best is None and late:
            raise late[0]
        return best[1] if best else None

    def as_it_stands(self, budget: Budget) -> Plan:
        """The planner's memory and time of the recipe with every choice as it says, whether it fits or not. Of a model
        that cannot be traced the bytes that are known (`ModelShape.unknown`)."""
        memory_plan = memory_plan_of(self.recipe, self.shape(self.recipe).num_layers)
        return self.priced(GlobalConfig.of(self.recipe), memory_plan, budget)

    def priced(self, setting: GlobalConfig, memory_plan: MemoryPlan, budget: Budget) -> Plan:
        """The planner's memory and time of a given memory plan, whether it fits or not.

        Raises:
            ValueError: it is for another number of layers.
        """
        shape = self.shape(self.recipe)
        if len(memory_plan.layers) != shape.num_layers:
            raise ValueError(f"a memory plan of {len(memory_plan.layers)} layers for a model of {shape.num_layers}")
        homes = {home for layer in memory_plan for home in (layer.parameters, layer.states)}
        known = OffloadFlags(is_offloaded=homes != {"device"}, on_disk="disk" in homes)
        table = self._table(self.recipe, {}, shape, setting, budget, known)
        layers, ends = memory_plan.layers, {"embedding": memory_plan.embedding, "head": memory_plan.head}
        if shape.tied:  # both ends read the one matrix: it stays on the device
            ends = dict.fromkeys(ends, LayerMemory())
        rows: list[PlanRow] = []
        for found in table.classes:
            mine = [ends[found.name]] if found.indices == (-1,) else [layers[i] for i in found.indices]
            args = (table.setting, shape, self.recipe, self.rates, budget.links)
            costs = {choice: layer_cost(found, choice, *args) for choice in dict.fromkeys(mine)}
            for choice in sorted(costs, key=lambda choice: -costs[choice].kept):
                taken = tuple(i for i, one in zip(found.indices, mine, strict=True) if one == choice and i >= 0)
                rows.append(PlanRow(found.name, taken, choice, costs[choice]))
        return self._assembled(table, tuple(rows))

    def _recipes(self) -> Iterator[tuple[Recipe, dict[str, str]]]:
        """Yield the recipe, and then recipes with fewer bits where the format is open."""
        yield self.recipe, {}
        for formats in narrower(self.recipe):
            if set(formats) <= self.open_formats:
                yield changed(self.recipe, formats), formats

    def _table(
        self,
        recipe: Recipe,
        narrowed: Mapping[str, str],
        shape: ModelShape,
        setting: GlobalConfig,
        budget: Budget,
        homes: OffloadFlags | None = None,
    ) -> _Table:
        setting = replace(setting, shards=setting.shards.beside(shape))
        ends = [
            end_class(name, weights, shape)
            for name, weights in (("embedding", shape.embedding), ("head", shape.head))
            if weights.count
        ]
        classes = (*shape.classes, *ends)
        options = tuple(
            (LayerMemory(),)  # both ends read the one matrix: it stays on the device
            if found.indices == (-1,) and shape.tied
            else tuple(choices(found, setting, shape, recipe, budget.links, self.fixed.of(found.indices)))
            for found in classes
        )
        groups = []
        for found, mine in zip(classes, options, strict=True):
            matmuls = GemmCost(found, setting.micro_batch_size, shape, self.rates)
            args = (setting, shape, recipe, self.rates, budget.links, matmuls)
            groups.append(ChoiceGroup(found.name, found.count, tuple(layer_cost(found, one, *args) for one in mine)))
        names = frozenset(found.name for found in ends)
        homes = homes or self._homes(budget)
        found = phases(shape, setting, recipe, self.machine, names, homes)
        cpu = self.machine.device == "cpu"
        base = FixedBytes.of(shape, setting, recipe, self.machine)
        host = {} if cpu else host_base(base, setting, recipe, homes)
        left = 1 - recipe.plan.margin
        device = left * budget.device * (1.0 if cpu else 1 - FRAGMENTS)
        limit = float("inf") if cpu else left * budget.host
        rollback = rollback_bytes(base, setting, recipe) if homes.on_disk else 0.0
        problem = PlanProblem(
            tuple(groups), tuple(found), device, limit, sum(host.values()), left * budget.disk - rollback
        )
        return _Table(recipe, narrowed, shape, budget, setting, classes, options, problem, host)

    def _homes(self, budget: Budget) -> OffloadFlags:
        """The places where the planner stores bytes, as if a disk that exists were used; see `_settled`."""
        fixed = {self.fixed.parameters, self.fixed.states}
        on_disk = budget.links.disk is not None
        return OffloadFlags(is_offloaded=on_disk or not fixed <= {None, "device"}, on_disk=on_disk)

    def _around(self, table: _Table, rows: Sequence[PlanRow] = ()) -> tuple[Operation, ...]:
        """The planner's operations of a step around the layers; a layer-major one that clips by the exact norm runs it
        twice."""
        recipe, shape, setting, links = table.recipe, table.shape, table.setting, table.budget.links
        head = head_parts_s(shape, setting, self.rates) if shape.plain_head else {}
        cut = cut_traffic(shape, recipe, setting.micro_batch_size, setting.num_micro, recomputed(rows))
        return (
            *layer_operations(shape.rest, LayerMemory(), setting, shape, recipe, self.rates, links),
            *computed(HEAD, head | teacher_s(shape, setting, recipe, self.rates, links)),
            *communication(shape, setting.shards, setting.num_micro, links.ranks, cut),
        )

    def _decided(self, table: _Table, answer: Answer, better: str, late: Sequence[OutOfTime]) -> Plan:
        """The solver's answer for the planner. `better`: than it another one may be; `late`: settings without one."""
        notes = (*stopped_note(answer, better, GAP), *left_out_note(len(late)))
        return replace(self._assembled(table, tuple(_rows(table, answer.counts)), notes), decided=True)

    def _assembled(self, table: _Table, rows: tuple[PlanRow, ...], more: tuple[str, ...] = ()) -> Plan:
        recipe, shape, setting, budget = table.recipe, table.shape, table.setting, table.budget
        classes = {found.name: found for found in table.classes}
        args = (setting, shape, recipe, self.rates, budget.links)
        rows = tuple(replace(row, operations=layer_operations(classes[row.name], row.choice, *args)) for row in rows)
        cpu = self.machine.device == "cpu"
        by_phase = {phase.name: owners_at(phase, rows) for phase in table.problem.phases}
        for name in (EVALUATE, CHECKPOINT):  # the busiest of each
            same = [by_phase.pop(key) for key in list(by_phase) if key.startswith(name)]
            by_phase[name] = max(same, key=lambda owners: sum(owners.values()))
        if not cpu:
            for owners in by_phase.values():
                owners["process"] += FRAGMENTS * budget.device
        host = {} if cpu else {**table.host, **on_host(rows)}
        told = (*documents_notes(recipe, shape), *slow_mode_notes(recipe, self.rates, self.machine))
        more = (*filter(None, [self.rates.load_note]), *told, *more)
        shared = setting.shards.notes(cpu, budget.links.ranks is not None)
        return Plan(
            recipe, shape, self.machine, budget, setting, rows, by_phase, host, self._around(table, rows),
            table.narrowed, (*shape.notes, *self.notes, *_guesses(self.machine, rows, budget), *shared, *more),
        )  # fmt: skip


def _guesses(machine: Machine, rows: Sequence[PlanRow], budget: Budget) -> tuple[str, ...]:
    found = ["guessed: shares of element-wise work, allocator's gaps, host memory of the process"]
    if machine.device == "cuda":
        found.append("no CUDA device has been measured for these constants; expect a larger error")
    away = any({row.choice.parameters, row.choice.states, row.choice.inputs} != {"device"} for row in rows)
    if budget.links.guessed and away:
        found.append(budget.links.guessed)
    return tuple(found)


def _rows(table: _Table, counts: Counts) -> Iterator[PlanRow]:
    """Make the plan's rows: options with their layers. The options that keep more get the upper layers: backward frees
    these first."""
    for found, mine, group, row in zip(table.classes, table.options, table.problem.groups, counts, strict=True):
        left = sorted(found.indices)
        used = [(cost, choice, n) for cost, choice, n in zip(group.costs, mine, row, strict=True) if n]
        for cost, choice, number in sorted(used, key=lambda item: -item[0].kept):
            taken = () if found.indices == (-1,) else tuple(left[len(left) - number :])
            left = left[: len(left) - number]
            yield PlanRow(found.name, taken, choice, cost)
