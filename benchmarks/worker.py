"""Contenders in processes of their own: each has its own peak of memory, and one that fails ends alone."""

import json
import subprocess
import sys
from typing import Any

import psutil


def call_worker(module: str, *arguments: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Run `python -m benchmarks.<module> ...`, and return the JSON object that is the last line of its output.

    Args:
        timeout_s: it is ended after that, its children with it.

    Returns:
        The object, or {"error": exit code and the end of what it printed}. Never raises for what the worker does.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            out, err = process.communicate()
            return {"error": f"ended after {timeout_s:.0f} s: {(err or out)[-2000:]}"}
    lines = out.splitlines()
    if process.returncode or not lines or not lines[-1].startswith("{"):
        return {"error": f"exit code {process.returncode}: {(err or out)[-2000:]}"}
    return json.loads(lines[-1])


def out_of_memory(found: dict[str, Any]) -> bool:
    """Whether a worker ended for want of device memory."""
    return "out of memory" in found.get("error", "").lower()
