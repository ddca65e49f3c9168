"""Plans of a run that is running: another budget, other rows, what measurements said; never another loss.

Executor, micro-batch, loss tile, formats, and each layer's MLP tiles and attention blocks stay as they are. What may
change is what layers keep (keep, selective, recompute), where that changes no bit of a result, and where bytes lie.
"""

from dataclasses import replace

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.model.constraints import KEPT, Constraints, fuses, same_bits
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner


class Replanner:
    """Plans one run in several budgets and lengths of rows.

    Args:
        planner: of the recipe as it runs.
        setting: how it runs.
        memory_plan: how it runs.
        budget: of the run; host and disk stay.
    """

    def __init__(self, planner: Planner, setting: GlobalConfig, memory_plan: MemoryPlan, budget: Budget) -> None:
        self.setting = setting
        self.budget = budget
        fused = fuses(planner.shape(planner.recipe).compiled, planner.machine)
        self._planner = planner.with_fixed(
            same_numbers(planner.fixed, planner.recipe, setting, memory_plan, fused=fused)
        )
        self._by_length: dict[int, Planner] = {planner.recipe.data.seq_len: self._planner}

    def plan(
        self, device_bytes: float, seq_len: int | None = None, *, memory_factor: float = 1.0, time_factor: float = 1.0
    ) -> Plan | None:
        """Replan in a device budget: the fastest memory plan, `plan.margin` left free; None where nothing fits.

        Args:
            device_bytes: of the device that the run may use.
            seq_len: of the rows; the recipe's by default.
            memory_factor: measured over planned bytes.
            time_factor: measured over planned seconds.
        """
        found = self._of(seq_len).plan(replace(self.budget, device=device_bytes / memory_factor))
        return None if found is None else found.scaled(memory_factor, time_factor)

    def smallest(self, seq_len: int | None = None, *, memory_factor: float = 1.0) -> Plan | None:
        """Find the memory plan with the fewest bytes on the device; None if the host has no room for it."""
        found = self._of(seq_len).smallest(self.budget)
        return None if found is None else found.scaled(memory_factor, 1.0)

    def predict(
        self,
        memory_plan: MemoryPlan,
        seq_len: int | None = None,
        *,
        memory_factor: float = 1.0,
        time_factor: float = 1.0,
    ) -> Plan:
        """The memory and time that a re-plan expects of a given memory plan."""
        found = self._of(seq_len).priced(self.setting, memory_plan, self.budget)
        return found.scaled(memory_factor, time_factor)

    def _of(self, seq_len: int | None) -> Planner:
        recipe = self._planner.recipe
        length = recipe.data.seq_len if seq_len is None else seq_len
        if length not in self._by_length:
            self._by_length[length] = self._planner.with_recipe(changed(recipe, {"data.seq_len": length}))
        return self._by_length[length]


def same_numbers(
    fixed: Constraints, recipe: Recipe, setting: GlobalConfig, memory_plan: MemoryPlan, *, fused: bool
) -> Constraints:
    """The choices that a re-plan has to keep in a run whose losses must stay.

    Args:
        fixed: before.
        recipe: of the run.
        setting: of the run.
        memory_plan: of the run.
        fused: see `constraints.fuses`.
    """

    def of(layer: LayerMemory) -> Constraints:
        kinds = same_bits(recipe, fused, layer.activations) & (fixed.activations or KEPT)
        cuts = {"mlp_chunks": layer.mlp_chunks, "attention_block": layer.attention_block}
        return replace(whole, activations=kinds, **cuts)

    whole = replace(
        fixed,
        executor=setting.executor,
        micro_batch_size=setting.micro_batch_size,
        loss_chunk_bytes=setting.loss_chunk_bytes,
        layers=(),
    )
    layers = tuple(of(layer) for layer in memory_plan.layers)
    return replace(layers[0], layers=layers if len(set(layers)) > 1 else ())
