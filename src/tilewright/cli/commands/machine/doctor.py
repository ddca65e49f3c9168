"""`tilewright doctor`: facts of this machine, the kernel of each operation with reasons, versions, disk speed.

Its `--json` output is what a bug report needs.
"""

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import (
    RecipeCommand,
    echo,
    is_verbose,
    json_option,
    overrides,
    print_json,
    recipe_argument,
    show_table,
    verbosity,
)
from tilewright.cli.run_tables import candidate_table, chosen_table
from tilewright.core.errors import NumericsError
from tilewright.core.hardware import Machine, detect_machine, fp8_choice
from tilewright.core.units import format_bytes
from tilewright.energy.processors import processor_counters

if TYPE_CHECKING:
    from tilewright.planner.cost.storage_links import LinkSpeed
    from tilewright.planner.machine.ceilings import Ceilings

DISK_TEST_BYTES = 64 * 2**20
_SHOWN = 20
"""Tensors that are beyond their tolerance, or with -v, shown at most."""


@click.command(cls=RecipeCommand)
@recipe_argument
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--parallel",
    metavar="pp=N,dp_shard=N,dp_replicate=N,tp=N,ep=N",
    help="Train RECIPE's model, tiny, on so many processes and on one, and show what differs.",
)
@json_option
@verbosity
@click.pass_context
def doctor(ctx: click.Context, recipe: str, device: str, parallel: str | None, as_json: bool) -> None:
    """Show this machine and the kernel chosen for each operation, with the reason."""
    if parallel is not None:
        _check_parallel(ctx, recipe, parallel, as_json)
        return
    import torch

    from tilewright.ops.kernels import Kernels
    from tilewright.planner.cost import storage_links
    from tilewright.planner.cost.mode_speed import slow_modes
    from tilewright.planner.machine import ceilings, step_share

    machine = detect_machine(device)
    torch.set_num_threads(machine.physical_cores)  # as a run has them: ceilings are kept by number of threads
    rates, speeds = ceilings.known(machine), storage_links.known(machine, Path.cwd())
    kernels = Kernels(machine).explain()
    speed = _disk_write_speed(Path.cwd())
    slow = {} if rates is None else slow_modes(rates, machine)
    shares = {} if rates is None else step_share.known(rates.key)
    warnings = _warnings(machine)
    if as_json:
        disk = {"path": str(Path.cwd()), "write_bytes_per_s": speed}
        fp8 = asdict(fp8_choice(machine))
        measured = {
            "ceilings": None if rates is None else rates.to_json(),
            "slower_than_fp32": None if rates is None else slow,
            "steps": {name: asdict(share) for name, share in shares.items()},
            "links": {name: asdict(found) for name, found in speeds.items()},
        }
        found = {"machine": machine.to_json(), "fp8": fp8, "kernels": kernels, "disk": disk, "warnings": warnings}
        print_json(found | measured)
        return
    _print_machine(machine, speed)
    steps = [("step", f"{name}: {share}") for name, share in shares.items()]
    for label, text in _measured(rates, slow, speeds) + (
        steps or [("step", "not measured yet: tilewright bench step")]
    ):
        echo(f"{label:<9} {text}", hang=10 if label else 0)
    echo()
    show_table(*(candidate_table if is_verbose() else chosen_table)(kernels))
    if not is_verbose():
        echo("The kernels that this machine cannot use, with the reasons: tilewright doctor -v")
    for warning in warnings:
        echo(f"note: {warning}")


def _check_parallel(ctx: click.Context, recipe: str, mesh: str, as_json: bool) -> None:
    """`doctor --parallel`: several processes against one, the worst tensors first.

    Raises:
        NumericsError: something is beyond its tolerance.
    """
    from tilewright.cli.commands.outputs.parity import STEPS, compare, parse_sizes
    from tilewright.core.config.load import load_recipe

    gaps = compare(load_recipe(recipe, overrides(ctx)), parse_sizes(mesh))
    bad = [gap for gap in gaps if not gap.ok]
    if as_json:
        print_json({"mesh": mesh, "steps": STEPS, "gaps": [asdict(gap) for gap in gaps], "beyond": len(bad)})
    else:
        shown = [gap for gap in gaps if is_verbose() or gap in bad][:_SHOWN]
        shown += [next(gap for gap in gaps if gap.kind == kind) for kind in dict.fromkeys(gap.kind for gap in gaps)]
        rows = [[gap.kind, gap.name, f"{gap.error:.2g}", f"{gap.tolerance:.2g}"] for gap in dict.fromkeys(shown)]
        show_table(["what", "worst", "relative difference", "tolerance"], rows)
    if bad:
        raise NumericsError(
            "Several processes compute something else than one",
            got=f"{len(bad)} of {len(gaps)} numbers beyond their tolerance, the worst: {bad[0].kind} {bad[0].name}",
            need="the same loss, gradients and weights but for the order of sums",
            try_=f"tilewright doctor -v --parallel {mesh} {recipe}, and report it",
        )
    if not as_json:
        echo(f"{len(gaps)} numbers after {STEPS} steps are those of one process within their tolerance")


def _print_machine(machine: Machine, speed: float | None) -> None:
    capability = "" if machine.capability is None else f", compute capability {'.'.join(map(str, machine.capability))}"
    choice = fp8_choice(machine)
    rows = [
        ("device", f"{machine.device}: {machine.device_name}{capability}"),
        ("memory", _memory(machine)),
        ("cores", f"{machine.physical_cores} physical"),
        ("vectors", _vectors(machine)),
        ("fp8", f"{choice.mode}: {choice.reason} (on the unit: {', '.join(choice.native) or 'nothing'})"),
        ("compiler", _compiler(machine)),
        ("disk", "this folder cannot be written to" if speed is None else f"{format_bytes(speed)}/s written here"),
        ("energy", _energy()),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
    ]
    for label, text in rows:
        echo(f"{label:<9} {text}", hang=10)


def _energy() -> str:
    """Energy in `doctor`: which counters of joules a run would read, or why none."""
    found = processor_counters()
    parts = ", ".join(f"{counter.part.name} ({counter.part.how})" for counter in found.counters)
    return parts or f"unavailable: {'; '.join(found.reasons)}"


def _vectors(machine: Machine) -> str:
    prefixes = ("amx", "avx512_", "avx2", "sve", "asimd")
    names = " ".join(sorted(name for name in machine.cpu_features if name.startswith(prefixes))) or "unknown"
    return f"{names} (the CPU has more: {', '.join(machine.cpu_limits)})" if machine.cpu_limits else names


def _measured(
    rates: "Ceilings | None", slow: dict[str, float], speeds: "dict[str, LinkSpeed]"
) -> list[tuple[str, str]]:
    """Rows of `doctor` on measured rates, with which plans are made, and on modes that these make slower than fp32."""
    from tilewright.planner.cost.mode_speed import in_words

    if rates is None:
        rows = [("ceilings", "not measured yet: tilewright plan does it once, in seconds")]
    else:
        best = {fmt: max(by_width.values()) for fmt, by_width in rates.matmul.items()}
        flops = ", ".join(f"{fmt} {rate / 1e12:.3g}" for fmt, rate in best.items())
        updates = ", ".join(f"{moments} {rate / 1e6:.3g}" for moments, rate in rates.adam.items())
        rows = [
            ("ceilings", f"matmuls in TFLOP/s: {flops}; memory {format_bytes(rates.bandwidth)}/s"),
            ("", f"updates in million parameters/s by moments: {updates}"),
            ("modes", f"slower than fp32 here, by matmuls: {in_words(slow)}" if slow else "none is slower than fp32"),
        ]
        rows += [("", rates.load_note)] if rates.load_note else []
    return rows + [("link", f"{name}: {speed}") for name, speed in speeds.items()]


def _memory(machine: Machine) -> str:
    host = f"{format_bytes(machine.host_memory_bytes)} host"
    return host if machine.device == "cpu" else f"{format_bytes(machine.device_memory_bytes)} device, {host}"


def _compiler(machine: Machine) -> str:
    from tilewright.ops.base.compile import compile_options, why_no_compile

    if why_no_compile(machine):
        return "layers are not compiled on the CPU"
    march = compile_options().get("cpp.march")
    return (
        f"{machine.cxx_compiler}, told {march}: it has no tuning for this CPU" if march else f"{machine.cxx_compiler}"
    )


def _warnings(machine: Machine) -> list[str]:
    import torch

    from tilewright.ops.base.compile import why_no_compile

    found = []
    fault = why_no_compile(machine)
    if fault:
        found.append(f"training on the CPU runs uncompiled and slower: {fault}")
    if machine.device == "cpu" and not machine.cpu_multiplies(torch.bfloat16):
        found.append("this CPU has no BF16 instructions: BF16 matmuls run in FP32, no faster than mode fp32")
    return found


def _disk_write_speed(folder: Path) -> float | None:
    """Disk speed in `doctor`: bytes/s of writing a file through to the disk; None where the folder cannot be written
    to."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tilewright-disk-") as file:
            start = time.perf_counter()
            for _ in range(DISK_TEST_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return DISK_TEST_BYTES / (time.perf_counter() - start)
    except OSError:
        return None
