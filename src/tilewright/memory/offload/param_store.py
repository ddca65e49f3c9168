"""A model's parameters and its optimizer's states stored in tiers, each layer group in its own.

    offloader = ParamOffloader(model, layer_groups, optimizer, device, parameters="host", states="disk", folder=folder)
    offloader.prefetch(next_part)
    offloader.fetch(part, states=True)
    optimizer.step_params(part.trained, grads)
    offloader.release(part, changed=True)
    offloader.flush()  # once a step: errors of the disk come out here at the latest
    offloader.move(part, parameters="device", states="disk")  # between steps

States are made here, where the optimizer has none yet, and are never all in memory unless their tier is the device. A
layer group's parameters are named as in the model, its states `<parameter>.<state>`. The optimizer's step counters are
no bytes to speak of and stay where they are. The layer group of parameters that several others read stays on the
device.

Built by `training.executor.executor_kinds`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewright.core.config.recipe import Tier
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.memory.offload.pool import OffloadPool
from tilewright.models.base.protocols import InitialValues
from tilewright.models.layerwise.layer_view import LayerGroup, LayerGroups
from tilewright.optim.adam import DeepSeekAdam

Homes = Tier | Mapping[str, Tier]
"""A tier for all layer groups, or one for each by its name. The layer group that several others read is on the device
anyway."""


class ParamOffloader:
    """Brings the parameters of layer groups to the device and takes them away.

    Args:
        model: its parameters are real, or vacant (`lazy_params.to_placeholders`) where there are `values`.
        layer groups: of the model.
        optimizer: without states yet.
        device: where the model computes.
        parameters: tiers of the parameters.
        states: tiers of the optimizer's states.
        folder: of the disk tier.
        prefetch: layer groups that may be on their way, or written back, while one is used.
        values: makes the parameters' initial values; None takes those that they have.

    Raises:
        FitError: a tier has not so much room.
        ConfigError: the folder cannot be written.
        CheckpointError: the values' files are corrupt.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_groups: LayerGroups,
        optimizer: DeepSeekAdam,
        device: torch.device | str,
        *,
        parameters: Homes = "device",
        states: Homes = "device",
        folder: Path | str | None = None,
        prefetch: int = 1,
        values: InitialValues | None = None,
    ) -> None:
        assert not optimizer.state, "states that are there already would be in memory twice"
        self.parameters = OffloadPool("device", device, folder=folder, prefetch=prefetch)
        self.states = OffloadPool("device", device, folder=folder, prefetch=prefetch)
        self._states_live: set[str] = set()
        names = {param: name for name, param in model.named_parameters()}
        for part in layer_groups:
            own = {names[param]: param for param in part.params}
            tier = _home(parameters, part, layer_groups)
            self.parameters.add(part.name, own, fill=values, tier=tier, resident=part is layer_groups.shared)
        self.parameters.seal()
        for part in layer_groups:
            fill = _StateValues(self.parameters, part.name)
            own = _placeholder_states(optimizer, {names[param]: param for param in part.trained})
            tier = _home(states, part, layer_groups)
            self.states.add(part.name, own, fill=fill, tier=tier, resident=part is layer_groups.shared)
        self.states.seal()

    def prefetch(self, part: LayerGroup, *, states: bool = False) -> None:
        """Begin to bring a layer group to the device, and its states if they will be wanted."""
        self.parameters.prefetch(part.name)
        if states:
            self.states.prefetch(part.name)

    def fetch(self, part: LayerGroup, *, states: bool = False) -> None:
        """Bring a layer group's parameters to the device before this returns, and its states if they are wanted.

        Raises:
            HardwareError: the disk fails, or failed before. The layer group is not live then.
        """
        self.parameters.fetch(part.name)
        if not states:
            return
        try:
            self.states.fetch(part.name)
        except BaseException:
            self.parameters.release(part.name, changed=False)
            raise
        self._states_live.add(part.name)

    def release(self, part: LayerGroup, *, changed: bool) -> None:
        """Release parameters of a layer group; what changed is written back."""
        changed = changed and bool(part.trained)
        self.parameters.release(part.name, changed=changed)
        if part.name in self._states_live:
            self._states_live.remove(part.name)
            self.states.release(part.name, changed=changed)

    def homes(self, part: LayerGroup) -> tuple[Tier, Tier]:
        """The tiers in which a layer group's parameters and states are kept."""
        return self.parameters.tier_of(part.name), self.states.tier_of(part.name)

    def flush(self) -> None:
        """Wait until all parameters and states that were released are stored.

        Raises:
            HardwareError: it cannot be written.
        """
        self.parameters.flush()
        self.states.flush()

    @property
    def is_offloaded(self) -> bool:
        """True where the parameter store has anything off the device."""
        return self.parameters.is_offloaded or self.states.is_offloaded

    def move(self, part: LayerGroup, *, parameters: Tier, states: Tier) -> None:
        """Move a layer group to other tiers; see `OffloadPool.move`. Not the layer group that several others read.

        Raises:
            FitError: a tier has not so much room. What did not move is where it was.
            HardwareError: the disk fails.
            RuntimeError: the device has not so much memory.
        """
        self.parameters.move(part.name, parameters)
        self.states.move(part.name, states)

    def close(self) -> None:
        """Close the parameter store: free all room. What is not live is lost."""
        self.parameters.close()
        self.states.close()


def _home(homes: Homes, part: LayerGroup, layer_groups: LayerGroups) -> Tier:
    if part is layer_groups.shared:
        return "device"
    return homes if isinstance(homes, str) else homes[part.name]


class _StateValues:
    """First values of a layer group's states: zero, or the parameter's own value if the state is its master."""

    def __init__(self, parameters: OffloadPool, part: str) -> None:
        self._parameters, self._part = parameters, part

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        masters = {name for name in tensors if name.endswith(".master")}
        values = self._parameters.read(self._part) if masters else {}
        for name, tensor in tensors.items():
            if name in masters:
                tensor.copy_(values[name.removesuffix(".master")])
            else:
                tensor.zero_()


def _placeholder_states(optimizer: DeepSeekAdam, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Give the optimizer placeholders for the states of these parameters, without memory; returns the states by
    name."""
    made: dict[str, Tensor] = {}
    for name, param in params.items():
        state = optimizer.state[param]
        state["step"] = torch.tensor(0, dtype=torch.int64)
        for key, (shape, dtype) in optimizer.state_layout(param).items():
            state[key] = made[f"{name}.{key}"] = placeholder(shape, dtype, param.device)
    return made
