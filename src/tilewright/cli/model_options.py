"""The argument and the options of commands that open a run or a model; see `open_model`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tilewright.cli.common import LATEST, THREADS, FiniteRange, run_or_model

Function = TypeVar("Function", bound=Callable[..., Any])


def model_argument(function: Function) -> Function:
    """Add the argument of a command that takes a run or a model: `runs/latest` where it is left out."""
    return click.argument("name", default=LATEST, metavar="[RUN_OR_MODEL]", callback=run_or_model)(function)


def model_options(function: Function) -> Function:
    """A model's options: `--dtype`, `--device`, `--threads` and `--chat-template`, under the names of `open_model`'s
    arguments."""
    function = click.option(
        "--chat-template", default="", help="Template in place of the model's own: chatml, or a .jinja file."
    )(function)
    function = click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Device of the model.",
    )(function)
    function = threads_option(function)
    return click.option(
        "--dtype",
        type=click.Choice(["auto", "bf16", "fp32"]),
        default="auto",
        show_default=True,
        help="Dtype of the weights; auto keeps BF16 folders in BF16, and runs in FP32.",
    )(function)


def threads_option(function: Function) -> Function:
    """A model's option `--threads`."""
    return click.option(
        "--threads",
        type=THREADS,
        help="CPU threads. Default: those of the run, else one per physical core.",
    )(function)


def sampling_options(*, temperature: float, top_k: int) -> Callable[[Function], Function]:
    """A model's options of sampling: `--temperature` and `--top-k`, with these defaults."""

    def add(function: Function) -> Function:
        function = click.option(
            "--top-k",
            default=top_k,
            show_default=True,
            type=click.IntRange(0),
            help="Sample among the k most likely tokens; 0 is off.",
        )(function)
        return click.option(
            "--temperature",
            default=temperature,
            show_default=True,
            type=FiniteRange(0),
            help="Sampling temperature; 0 is greedy decoding.",
        )(function)

    return add
