"""An export target: a name, what it needs, why it cannot hold a model, how it is written, who proves it."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilewright.compress.export.export_source import ExportSource

Use = Literal["training", "serving", "edge"]


@dataclass(frozen=True)
class Consumer:
    """The runtime that an artefact is for. It runs as `python -m module`, see `prove.consumer_session`.

    Args:
        name: as people call it: "llama.cpp".
        module: full name of the script that answers for it.
        packages: to import; without them the proof is "unavailable".
        extra: of tilewright, which installs them; "" where every installation has them.
    """

    name: str
    module: str
    packages: tuple[str, ...] = ()
    extra: str = ""


@dataclass(frozen=True)
class Written:
    """The report of `Target.write` on the artefact, beside its bytes.

    Args:
        notes: what was left out or decided, in words; shown and recorded.
        lint_only: why this artefact cannot run in its consumer although it was checked; "" where it can.
        quantized: matrices by format, such as {"q8_0": 33, "f32": 9}; empty where nothing is quantised.
        options: for the consumer, JSON; see `prove.consumer_session.Request`.
        stored: makes the model with the values that the artefact stores, see `compress.stored_values`; None where they
            are unknown.
        differing: reads the artefact, and says which of its weights are not the model's, in words; "" where all are.
            None where nothing reads them.
        trained: it holds the codes that the run was trained with, and is compared with the model as it was trained.
    """

    notes: Sequence[str] = ()
    lint_only: str = ""
    quantized: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    stored: Callable[[], Any] | None = None
    differing: Callable[[Path], str] | None = None
    trained: bool = False


@dataclass(frozen=True)
class Target:
    """One form that a model can be exported in.

    Args:
        name: on the command line: "gguf-q8_0".
        use: which of the three outputs it is.
        file: name of the file or folder in the output folder, from the run's name: "{run}.q8_0.gguf", "hf".
        write: writes the artefact to a path that does not exist yet. What it leaves there is published by a rename
            when it returns, and deleted when it raises; OSError means a full disk.
        why_not: why the format cannot hold this model, in words that follow "not written:"; None where it can. Quick:
            asked for every target before work begins.
        consumer: who proves it.
        packages: that `write` imports.
        extra: of tilewright, which installs them; "" where every installation has them.
        takes: the integer format of precision rules whose codes it stores as they were trained; "" for none.
        images: whether it holds models that read images, too.
    """

    name: str
    use: Use
    file: str
    write: Callable[[ExportSource, Path], Written]
    why_not: Callable[[ExportSource], str | None]
    consumer: Consumer
    packages: tuple[str, ...] = ()
    extra: str = ""
    takes: str = ""
    images: bool = False


def missing(packages: Sequence[str], extra: str) -> str | None:
    """Say which extra to install if packages of an export target are missing; None if all are there.

    Example:
        >>> missing(("json",), "gguf"), missing(("json", "no_such_package"), "gguf")
        (None, "no_such_package is not installed: pip install 'tilewright[gguf]'")
    """
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{', '.join(absent)} is not installed: pip install 'tilewright[{extra}]'" if absent else None
