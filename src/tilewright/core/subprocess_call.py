"""A function of ours called by `python -m`: the memory that it takes goes with that process.

Freed blocks do not leave a process when a small block that lives on shares their pages. Preparing data leaves 110 MiB
of such pages and measuring the machine 60, in a process that then trains for weeks beside them (docs/log.md).
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.core import env, errors
from tilewright.core.errors import HardwareError, Problem, TilewrightError
from tilewright.core.log import ROOT, configure, get_logger, say


def call_module(
    module: str,
    on_line: Callable[[str], object] = say,
    environ: Mapping[str, str] | None = None,
    on_start: Callable[["subprocess.Popen[str]"], object] = lambda _: None,
    **arguments: object,
) -> Any:
    """Run `python -m module`, which calls `answer`.

    Args:
        module: its full name.
        on_line: called with each line that the child prints. What it logs goes to stderr.
        environ: variables of the child in addition to this process's.
        on_start: given the process.
        arguments: of the function that the module gives to `answer`, as JSON has them.

    Returns:
        What that function returned, as JSON has it.

    Raises:
        TilewrightError: the one that the function raised.
        HardwareError: the process was killed.
    """
    sys.stdout.flush()
    request = {"level": get_logger(ROOT).getEffectiveLevel(), "arguments": arguments}
    command = [sys.executable, "-P", "-m", module, json.dumps(request)]
    found: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env.importing(Path(__file__).parents[2]) | dict(environ or {})
    ) as child:
        assert child.stdout is not None
        on_start(child)
        for line in child.stdout:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                on_line(line.rstrip("\n"))
    if "problems" in found:
        raise getattr(errors, found["error"]).from_problems([Problem(**problem) for problem in found["problems"]])
    if child.returncode < 0:
        raise HardwareError(
            "Worker process was killed",
            got=f"signal {-child.returncode} ({signal.Signals(-child.returncode).name})",
            need="enough memory for it: Linux kills processes when there is none left",
            try_="the same command again with more memory free",
            where=module,
        )
    if child.returncode or not found:
        raise AssertionError(f"python -m {module} ended with exit code {child.returncode}; see its traceback above")
    return found["result"]


def answer(function: Callable[..., object]) -> None:
    """In the child: call `function` with the arguments of `call_module`, and print its result or error as JSON."""
    request = json.loads(sys.argv[1])
    configure()
    get_logger(ROOT).setLevel(request["level"])
    try:
        found = {"result": function(**request["arguments"])}
    except TilewrightError as error:
        answer_error(error)
        return
    except KeyboardInterrupt:  # the parent was interrupted, too
        sys.exit(130)
    print(json.dumps(found), flush=True)


def answer_error(error: TilewrightError) -> None:
    """In the child: print an error as `call_module` reads it, of a class of our own as its nearest one in `errors`."""
    name = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    print(json.dumps({"error": name, "problems": [asdict(problem) for problem in error.problems]}), flush=True)
