"""Where slices are while they do not compute: the interface of what brings them to the device, and the simplest of its
implementations, for slices that live there. `residence.Tiers` is the other one."""

from typing import Protocol

from tilewright.core.config import Tier
from tilewright.core.errors import ConfigError
from tilewright.models.layered import Slice


class Residence(Protocol):
    """Brings slices to the device and takes them away."""

    def prefetch(self, part: Slice, *, states: bool) -> None:
        """Begin to bring a slice's parameters, and their optimizer states where they are asked for."""
        ...

    def fetch(self, part: Slice, *, states: bool) -> None:
        """Have them on the device when this returns."""
        ...

    def release(self, part: Slice, *, changed: bool) -> None:
        """Let go of it; its bytes are kept where they are at home."""
        ...

    def homes(self, part: Slice) -> tuple[Tier, Tier]:
        """Where a slice's parameters and states are at home."""
        ...

    def move(self, part: Slice, *, parameters: Tier, states: Tier) -> None:
        """Give a slice other homes. Not within a step."""
        ...

    def flush(self) -> None:
        """Wait until all that was released is at home."""
        ...

    def close(self) -> None:
        """Give all room back."""
        ...


class AtHome:
    """The residence of parameters that live on the device."""

    def prefetch(self, part: Slice, *, states: bool) -> None:
        """Nothing to do."""

    def fetch(self, part: Slice, *, states: bool) -> None:
        """Nothing to do."""

    def release(self, part: Slice, *, changed: bool) -> None:
        """Nothing to do."""

    def homes(self, part: Slice) -> tuple[Tier, Tier]:
        """The device."""
        return "device", "device"

    def move(self, part: Slice, *, parameters: Tier, states: Tier) -> None:
        """There is nowhere else to go.

        Raises:
            ConfigError: somewhere else is asked for.
        """
        if (parameters, states) != ("device", "device"):
            raise ConfigError(
                "This executor has no tiers.",
                got=f'{part.name}: parameters on "{parameters}", states on "{states}"',
                need='"device"',
                try_="a residence of the class memory.residence.Tiers",
            )

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
