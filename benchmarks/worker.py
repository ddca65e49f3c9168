"""Contenders in processes of their own: each has its own peak of memory, and one that fails ends alone."""

import json
import subprocess
import sys
from typing import Any


def call_worker(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m benchmarks.<module> ...`, and return the JSON object that is the last line of its output.

    Returns:
        The object, or {"error": exit code and the end of what it printed}. Never raises for what the worker does.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"error": f"exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"}
    return json.loads(lines[-1])


def out_of_memory(found: dict[str, Any]) -> bool:
    """Whether a worker ended for want of device memory."""
    return "out of memory" in found.get("error", "").lower()
