"""`tilewright doctor`: facts of this machine, the kernel of each operation with reasons, versions, disk speed.

Its `--json` output is what a bug report needs.
"""

import os
import tempfile
import time
from pathlib import Path

import click

from tilewright.cli.common import json_option, print_json, verbosity
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import say
from tilewright.core.units import format_bytes

DISK_TEST_BYTES = 64 * 2**20


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@json_option
@verbosity
def doctor(device: str, as_json: bool) -> None:
    """What this machine is, and which kernel each operation gets, and why."""
    from tilewright.ops.kernels import Kernels

    machine = detect_machine(device)
    kernels = Kernels(machine).explain()
    speed = _disk_write_speed(Path.cwd())
    warnings = _warnings(machine)
    if as_json:
        disk = {"path": str(Path.cwd()), "write_bytes_per_s": speed}
        print_json({"machine": machine.to_json(), "kernels": kernels, "disk": disk, "warnings": warnings})
        return
    _print_machine(machine, speed)
    say()
    say(_kernel_table(kernels))
    for warning in warnings:
        say(f"note: {warning}")


def _print_machine(machine: Machine, speed: float | None) -> None:
    capability = "" if machine.capability is None else f", compute capability {'.'.join(map(str, machine.capability))}"
    wide = sorted(name for name in machine.cpu_features if name.startswith(("amx", "avx512_", "avx2", "sve", "asimd")))
    rows = [
        ("device", f"{machine.device}: {machine.device_name}{capability}"),
        ("memory", _memory(machine)),
        ("cores", f"{machine.physical_cores} physical"),
        ("vectors", " ".join(wide) or "unknown"),
        ("compiler", machine.cxx_compiler or "none: layers are not compiled on the CPU"),
        ("disk", "this folder cannot be written to" if speed is None else f"{format_bytes(speed)}/s written here"),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
    ]
    for label, text in rows:
        say(f"{label:<9} {text}")


def _memory(machine: Machine) -> str:
    host = f"{format_bytes(machine.host_memory_bytes)} host"
    return host if machine.device == "cpu" else f"{format_bytes(machine.device_memory_bytes)} device, {host}"


def _kernel_table(rows: list[dict[str, object]]):
    """One line an operation and case; the reasons against the others in the last column."""
    from rich.table import Table

    table = Table("operation", "case", "chosen", "not chosen, because", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        rejected = row["rejected"]
        assert isinstance(rejected, list)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        table.add_row(str(row["op"]), str(row["case"]), str(row["chosen"]), reasons)
    return table


def _warnings(machine: Machine) -> list[str]:
    found = []
    if machine.cxx_compiler is None:
        found.append("no C++ compiler (CXX, g++, clang++): training on the CPU runs uncompiled and slower")
    if machine.device == "cpu" and not {"amx_bf16", "avx512_bf16"} & machine.cpu_features:
        found.append("this CPU has no BF16 instructions: precision.mode = fp32 is likely the fastest here")
    return found


def _disk_write_speed(folder: Path) -> float | None:
    """Bytes/s of writing a file through to the disk; None where the folder cannot be written to."""
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
