"""`tilewright bench comm`: what ranks exchange in how long, by operation, wire format and size."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.common import echo, print_json, show_table
from tilewright.core import env
from tilewright.core.atomic_io import write_whole
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.json_text import to_json
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tilewright.planner.machine.measured_links import MeasuredLinks

SIZES = "4KiB,256KiB,4MiB,32MiB"
MOST_BYTES = 2**33
"""Of one tensor: each rank holds two of them."""


def sizes_of(text: str) -> list[int]:
    """Sizes of `bench comm --sizes`.

    Raises:
        ConfigError: one is none, or too large.

    Example:
        >>> sizes_of("4KiB, 1MiB")
        [4096, 1048576]
    """
    found = []
    for word in text.split(","):
        try:
            size = parse_bytes(word)
        except ValueError:
            size = 0
        if not 0 < size <= MOST_BYTES:
            raise ConfigError(
                "--sizes has no size of a tensor",
                got=word.strip() or f"nothing in {text!r}",
                need=f"bytes from 1 to {format_bytes(MOST_BYTES)}, separated by commas",
                try_=f"--sizes {SIZES}",
                where="--sizes",
            )
        found.append(size)
    return found


def bench_comm(recipe: Recipe, ranks: int | None, sizes: str, out: Path | None, *, as_json: bool) -> None:
    """`bench comm`: measure, show, and write the file that plans read.

    Args:
        recipe: says the device.
        ranks: processes to start on this machine; None: two. Under torchrun those that it has started.
        sizes: bytes of whole tensors in FP32.
        out: file to write; None: none.
        as_json: instead of a table.

    Raises:
        ConfigError: sizes that are none, ranks that torchrun has not started, or a GPU without torchrun.
    """
    wanted, started = sizes_of(sizes), env.ranks().world
    if started > 1:
        if ranks not in (None, started):
            raise ConfigError(
                "--ranks under torchrun",
                got=f"--ranks {ranks}, and {started} processes that torchrun has started",
                need="one of them: its processes are the ranks",
                try_=f"torchrun --nproc-per-node {ranks} -m tilewright bench comm",
                where="--ranks",
            )
        found = _under_torchrun(recipe, wanted)
    else:
        found = _of_own(recipe, ranks or 2, wanted)
    if found is None:  # another rank tells
        return
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if out is not None:
        write_whole(out, to_json(found.to_json(), indent=2) + "\n")
        say(f"wrote {out}")


def _of_own(recipe: Recipe, ranks: int, sizes: Sequence[int]) -> "MeasuredLinks":
    from tilewright.core.hardware import detect_machine
    from tilewright.planner.machine import rank_link

    if detect_machine(recipe.run.device).device != "cpu":
        raise ConfigError(
            "GPUs exchange under torchrun",
            got="a GPU, and one process",
            need="a process for each GPU",
            try_="torchrun --nproc-per-node 2 -m tilewright bench comm, or --run.device cpu",
        )
    return rank_link.links(ranks, sizes)


def _under_torchrun(recipe: Recipe, sizes: Sequence[int]) -> "MeasuredLinks | None":
    import torch
    import torch.distributed as dist

    from tilewright.core.hardware import detect_machine
    from tilewright.parallel.launch import launched
    from tilewright.parallel.mesh import REST, MeshSizes
    from tilewright.planner.machine.exchange_times import measure
    from tilewright.planner.machine.measured_links import MeasuredLinks

    device, limit = recipe.run.device, 60 * recipe.parallel.timeout_minutes
    with launched(MeshSizes(dp_shard=REST), device=device, timeout_s=limit, facts={"sizes": str(sizes)}) as world:
        group = world.data.handle
        assert world.mesh is not None
        assert group is not None, "there are several"
        kind = world.mesh.device_type
        points = measure(group, torch.device(kind), sizes)
        if not world.is_first:
            return None
        name = "nccl" if kind == "cuda" else str(dist.get_backend(group))
        nodes, machine = -(-world.size // world.local_size), detect_machine(device).device_name
        return MeasuredLinks(world.size, nodes, name, machine, tuple(points))


def _show(found: "MeasuredLinks") -> None:
    echo(f"{found.ranks} ranks on {found.nodes} machine{'s' * (found.nodes > 1)}, {found.backend}, {found.device}")
    fits = found.fits()
    rows = []
    for point in found.points:
        fit = fits[point.operation, point.format]
        rows.append((
            *(point.operation, point.format, format_bytes(point.tensor_bytes), format_bytes(point.sent_bytes)),
            *(format_seconds(point.seconds), f"{format_bytes(point.sent_bytes / point.seconds)}/s"),
            f"{format_seconds(fit.latency_s)} + {format_bytes(fit.bytes_per_s)}/s",
        ))  # fmt: skip
    show_table(("operation", "format", "tensor", "sent", "seconds", "rate", "latency + rate"), rows)
    echo("sent: bytes that one rank sends to others. seconds: median of six, of the rank that waits longest")
