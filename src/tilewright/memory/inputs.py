"""The inputs of layers between forward and backward: kept on the device, on the host or on disk.

    store = InputStore("disk", device, folder=folder)
    store.put(layer, micro, x)            # forward
    store.prefetch(layer, micro)          # backward, a little ahead
    x = store.get(layer, micro)           # any number of times
    store.drop(layer, micro)

Exact, or as E4M3 codes with a scale for each 1x128 tile: half of BF16's bytes, and a layer that is recomputed from
them has gradients that are about 3 % off (as `models.activation.run_from_codes`). On a CPU run device and host are the
same memory, so nothing moves between them. How the tiers hold bytes is `input_tiers`. Called by `memory.layer_major`.

Legend: ... any leading dimensions  D width of the residual stream.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.config import Tier
from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import TiledTensor
from tilewright.memory.input_tiers import DeviceTier, DiskTier, HostTier, Key
from tilewright.models.config import CheckpointInputs
from tilewright.ops.kernels import Kernels


@dataclass(frozen=True)
class _Entry:
    """What `get` needs besides the bytes."""

    shape: torch.Size
    dtype: torch.dtype
    coded: bool


class InputStore:
    """Tensors by (layer, micro-batch).

    Args:
        tier: device, host or disk.
        device: where tensors come from and are handed out.
        kind: exact, or fp8 for inputs in 8 bits.
        kernels: implementations of the operations, for fp8.
        folder: where the disk tier keeps its file, which has no name and is gone with the process.

    Raises:
        ConfigError: a folder that cannot be written.

    Example:
        >>> store = InputStore("device", "cpu")
        >>> store.put(0, 0, torch.ones(2, 3))
        >>> store.get(0, 0).shape, store.num_bytes
        (torch.Size([2, 3]), {'device': 24})
        >>> store.drop(0, 0)
        >>> store.num_bytes
        {'device': 0}
    """

    def __init__(
        self,
        tier: Tier,
        device: torch.device | str,
        kind: CheckpointInputs = "exact",
        *,
        kernels: Kernels | None = None,
        folder: Path | str | None = None,
    ) -> None:
        if kind == "fp8" and kernels is None:
            raise ValueError("inputs in 8 bits need kernels")
        if tier == "disk" and folder is None:
            raise ValueError("the disk tier needs a folder")
        self.tier: Tier = tier
        self.kind: CheckpointInputs = kind
        self._kernels = kernels
        self._entries: dict[Key, _Entry] = {}
        device = torch.device(device)
        if tier == "disk":
            self._tier = DiskTier(Path(folder), device)
        elif tier == "host" and device.type != "cpu":
            self._tier = HostTier(device)
        else:
            self._tier = DeviceTier()

    @torch.no_grad()
    def put(self, layer: int, micro: int, x: Tensor, *, exact: bool = False) -> None:
        """Keep x. The caller may go on reading it and must not write into it.

        Args:
            layer: number of the layer.
            micro: number of the micro-batch.
            x: [..., D], any dtype.
            exact: keep this one as it is, whatever the store's kind: where a rounded input would change decisions.

        Raises:
            FitError: the disk is full.
            HardwareError: it cannot be written, or an earlier one could not.
        """
        coded = self.kind == "fp8" and not exact and x.is_floating_point()
        self._entries[layer, micro] = _Entry(x.shape, x.dtype, coded)
        if coded:
            tiled = self._kernels.quantize(x.detach().reshape(-1, x.shape[-1]), E4M3, ROW_TILE)
            self._tier.put((layer, micro), [tiled.codes.contiguous(), tiled.scale_inv.contiguous()])
        else:
            self._tier.put((layer, micro), [_own(x.detach())])

    def prefetch(self, layer: int, micro: int) -> None:
        """Begin to bring it to the device."""
        self._tier.prefetch((layer, micro))

    @torch.no_grad()
    def get(self, layer: int, micro: int) -> Tensor:
        """The tensor on the device, without a graph. Not to be written into.

        Raises:
            KeyError: never put, or dropped.
            HardwareError: the disk tier lost it.
        """
        entry = self._entries[layer, micro]
        parts = self._tier.get((layer, micro))
        if not entry.coded:
            return parts[0].detach()
        return TiledTensor(parts[0], parts[1], ROW_TILE, E4M3).dequantize(entry.dtype).view(entry.shape)

    def drop(self, layer: int, micro: int) -> None:
        """Let go of it."""
        del self._entries[layer, micro]
        self._tier.drop((layer, micro))

    def clear(self) -> None:
        """Let go of all, as when a step is given up."""
        for layer, micro in list(self._entries):
            self.drop(layer, micro)

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes held now in the tier; what is on its way is not counted."""
        return {self.tier: self._tier.num_bytes}

    def close(self) -> None:
        """Let go of all memory, files and threads."""
        self._entries.clear()
        self._tier.close()


def _own(x: Tensor) -> Tensor:
    """x, contiguous and without a larger storage behind it, which would be kept alive."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)
