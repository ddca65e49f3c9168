"""The inputs of layers between forward and backward: kept on the device, on the host or on disk, layer by layer.

    store = ActivationStore("disk", device, folder=folder)
    store.put(layer, micro, x)  # forward
    store.prefetch(layer, micro)  # backward, a little ahead
    x = store.get(layer, micro)  # any number of times
    store.drop(layer, micro)
    store.place({3: "host"})  # between steps: where later ones are kept; the rest on the device

Exact, or as E4M3 codes with a scale for each 1x128 tile: half of BF16's bytes, and a layer that is recomputed from them
has gradients that are about 3 % off (as `models.base.checkpointing.checkpoint_fp8_input`). On a CPU run device and host
are the same memory, so nothing moves between them. How the tiers hold bytes is `activation_stores`.

Legend: ... any leading dimensions  D width of the residual stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.config.recipe import CheckpointInputs, Tier
from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import FP8_ROW, TiledTensor
from tilewright.memory.offload.activation_stores import (
    CudaDiskActivations,
    DeviceActivations,
    DiskActivations,
    HostActivations,
    Key,
)
from tilewright.ops.kernels import Kernels

_Keeper = DeviceActivations | HostActivations | DiskActivations


@dataclass(frozen=True)
class _Entry:
    """Shape, dtype and place of kept bytes, which `get` needs."""

    shape: torch.Size
    dtype: torch.dtype
    coded: bool
    tier: Tier


class ActivationStore:
    """Layer inputs between forward and backward, by (layer, micro-batch).

    Args:
        tier: device, host or disk; or those by layer, the device for layers that are not named.
        device: where tensors come from and are handed out.
        kind: exact, or fp8 for inputs in 8 bits.
        kernels: implementations of the operations, for fp8.
        folder: where the disk tier keeps its file, which has no name and is gone with the process.

    Raises:
        ConfigError: a folder that cannot be written.

    Example:
        >>> store = ActivationStore("device", "cpu")
        >>> store.put(0, 0, torch.ones(2, 3))
        >>> store.get(0, 0).shape, store.num_bytes
        (torch.Size([2, 3]), {'device': 24})
        >>> store.drop(0, 0)
        >>> store.num_bytes
        {'device': 0}
    """

    def __init__(
        self,
        tier: Tier | Mapping[int, Tier],
        device: torch.device | str,
        kind: CheckpointInputs = "exact",
        *,
        kernels: Kernels | None = None,
        folder: Path | str | None = None,
    ) -> None:
        if kind == "fp8" and kernels is None:
            raise ValueError("inputs in 8 bits need kernels")
        self.kind: CheckpointInputs = kind
        self._kernels = kernels
        self._entries: dict[Key, _Entry] = {}
        self._device, self._folder = torch.device(device), folder
        self._keepers: dict[Tier, _Keeper] = {}
        self._rest: Tier = "device"
        self._by_layer: dict[int, Tier] = {}
        self.place(tier)

    def place(self, tier: Tier | Mapping[int, Tier]) -> None:
        """Keep activations in these tiers from now on. Memory that is no longer needed is freed.

        Args:
            tier: as for the constructor. Nothing may be kept now.

        Raises:
            ConfigError: a folder that cannot be written; all is as it was then.
            HardwareError: the disk failed before.
        """
        assert not self._entries, "inputs are kept: place() between steps"
        rest: Tier = "device" if isinstance(tier, Mapping) else tier
        by_layer: dict[int, Tier] = dict(tier) if isinstance(tier, Mapping) else {}
        wanted: set[Tier] = {rest, *by_layer.values()}
        if "disk" in wanted and self._folder is None:
            raise ValueError("the disk tier needs a folder")
        made: dict[Tier, _Keeper] = {name: self._keepers.get(name) or self._make(name) for name in sorted(wanted)}
        for name, keeper in made.items():
            keeper.forget(lambda layer, name=name: by_layer.get(layer, rest) != name)
        for name, keeper in self._keepers.items():
            if name not in made:
                keeper.close()
        self._rest, self._by_layer, self._keepers = rest, by_layer, made

    def tier_of(self, layer: int) -> Tier:
        """The tier in which the activations of a layer's input are kept."""
        return self._by_layer.get(layer, self._rest)

    def _make(self, tier: Tier) -> _Keeper:
        if tier == "disk":
            assert self._folder is not None, "checked by place()"
            on_disk = CudaDiskActivations if self._device.type == "cuda" else DiskActivations
            return on_disk(Path(self._folder), self._device)
        return HostActivations(self._device) if tier == "host" and self._device.type != "cpu" else DeviceActivations()

    @torch.no_grad()
    def put(self, layer: int, micro: int, x: Tensor, *, exact: bool = False, here: bool = False) -> None:
        """Keep the layer input x. The caller may continue reading it and must not write into it.

        Args:
            layer: number of the layer.
            micro: number of the micro-batch.
            x: [..., D], any dtype.
            exact: keep this one as it is, whatever the store's kind: where a rounded input would change decisions.
            here: keep this one on the device, whatever the layer's tier: where it is alive anyway.

        Raises:
            FitError: the disk is full.
            HardwareError: it cannot be written, or an earlier one could not.
        """
        coded = self.kind == "fp8" and not exact and x.is_floating_point()
        tier: Tier = "device" if here else self.tier_of(layer)
        keeper = self._keepers.setdefault(tier, DeviceActivations()) if here else self._keepers[tier]
        if coded:
            assert self._kernels is not None, "checked by the constructor"
            tiled = self._kernels.quantize(x.detach().reshape(-1, x.shape[-1]), FP8_ROW)
            keeper.put((layer, micro), [tiled.qdata.contiguous(), tiled.scale_inv.contiguous()])
        else:
            keeper.put((layer, micro), [_own(x.detach())])
        self._entries[layer, micro] = _Entry(x.shape, x.dtype, coded, tier)  # from here on there is something to drop

    def prefetch(self, layer: int, micro: int) -> None:
        """Begin to bring the activations of a layer's input to the device."""
        self._keepers[self._entries[layer, micro].tier].prefetch((layer, micro))

    @torch.no_grad()
    def get(self, layer: int, micro: int) -> Tensor:
        """Return a layer input on the device, without a graph. It must not be written into.

        Raises:
            KeyError: never put, or dropped.
            HardwareError: the disk tier lost it.
        """
        entry = self._entries[layer, micro]
        parts = self._keepers[entry.tier].get((layer, micro))
        if not entry.coded:
            return parts[0].detach()
        return TiledTensor(parts[0], parts[1], ROW_TILE, E4M3).dequantize(entry.dtype).view(entry.shape)

    def drop(self, layer: int, micro: int) -> None:
        """Free the activations of one layer's input."""
        self._keepers[self._entries.pop((layer, micro)).tier].drop((layer, micro))

    def clear(self) -> None:
        """Free the activations of all layers' inputs, as when a step is given up."""
        for layer, micro in list(self._entries):
            self.drop(layer, micro)

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes of activations held now, layer inputs, by tier; those under way are not counted."""
        return {tier: keeper.num_bytes for tier, keeper in self._keepers.items()}

    def close(self) -> None:
        """Close the activations' store: free all memory, files and threads."""
        self._entries.clear()
        for keeper in self._keepers.values():
            keeper.close()


def _own(x: Tensor) -> Tensor:
    """Give x memory of its own to be kept: contiguous, without a larger storage behind it, which would be kept
    alive."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)
