"""The command line: the table of commands, and how every error ends.

A command's file is imported when the command runs, so `--help` needs neither torch nor pydantic.
Exit codes: 0 done, 2 bad input, 3 does not fit, 4 stopped on numerics, 5 hardware, 1 an internal error.
"""

import difflib
import importlib
import os
import sys
from dataclasses import dataclass

import click

from tilewright.cli.error_text import is_of_others, print_once
from tilewright.core import env
from tilewright.core.errors import EXIT_INPUT, ConfigError, HardwareError, TilewrightError, is_of_path, path_error

EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

# Name -> (where the command is, one line of help), in the order a newcomer needs them.
COMMANDS = {
    "init": ("tilewright.cli.commands.init:init", "Write a commented recipe here."),
    "doctor": (
        "tilewright.cli.commands.machine.doctor:doctor",
        "Show this machine and the kernel chosen for each operation, with the reason.",
    ),
    "data": (
        "tilewright.cli.commands.datasets.group:data",
        "Build a dataset from raw files, look into one, and leave samples out.",
    ),
    "plan": (
        "tilewright.cli.commands.plan:plan",
        "Predict memory, step time and the bottleneck of a run, before it runs.",
    ),
    "simulate": (
        "tilewright.cli.commands.simulate:simulate",
        "Simulate a step of a pipeline on any number of ranks, from given costs and lengths.",
    ),
    "precision": (
        "tilewright.cli.commands.precision:precision",
        "Find the fastest precision for a recipe within a loss budget.",
    ),
    "train": ("tilewright.cli.commands.train:train", "Train a model from a recipe; continue where the run stopped."),
    "finetune": (
        "tilewright.cli.commands.chat_models.finetune:finetune",
        "Fine-tune a model on your conversations; continue where the run stopped.",
    ),
    "merge": (
        "tilewright.cli.commands.chat_models.merge:merge",
        "Write the model of a run, its adapters merged, as a Hugging Face folder.",
    ),
    "chat": (
        "tilewright.cli.commands.chat_models.chat:chat",
        "Talk to the model of a run, or to any model with a chat template.",
    ),
    "serve": (
        "tilewright.cli.commands.chat_models.serve:serve",
        "Serve the model of a run, or any model, behind OpenAI's API.",
    ),
    "eval": (
        "tilewright.cli.commands.eval:eval_",
        "Evaluate a run on its held-out text, or a run or a model on tasks, in FP32.",
    ),
    "generate": ("tilewright.cli.commands.generate:generate", "Continue a text with the model of a run."),
    "export": (
        "tilewright.cli.commands.outputs.export:export",
        "Export a run for other runtimes, and run each artefact in its own.",
    ),
    "compress": (
        "tilewright.cli.commands.outputs.compress:compress",
        "Cut, recover and export a run or a model inside a loss budget, with controls.",
    ),
    "search": (
        "tilewright.cli.commands.outputs.search:search",
        "Find layers of their own shape for a run, by latency measured on this machine.",
    ),
    "inspect": ("tilewright.cli.commands.inspect:inspect_", "Show the contents of a recipe, a run or a checkpoint."),
    "report": (
        "tilewright.cli.commands.outputs.report:report",
        "Judge a run and write its report: one HTML file that opens offline.",
    ),
    "watch": (
        "tilewright.cli.commands.outputs.watch:watch",
        "Show runs live in the browser: curves over each other, differing settings, load of the machine.",
    ),
    "bench": (
        "tilewright.cli.commands.machine.bench:bench",
        "Measure matmuls, a training step, or exchanges between processes on this machine.",
    ),
}

ON_RANKS = ("train", "finetune", "data", "bench")
"""Commands that torchrun may start; `data build` with `--executor rank`, `bench` with `comm`."""


@dataclass
class CliState:
    """Facts about the command that `main` needs when it fails."""

    verbosity: int = 0


def check_one_process(command: str) -> None:
    """Check of the command line: few commands share their work among several processes; each would do all of any other.

    Raises:
        HardwareError: torchrun has started more than one.
    """
    world = env.ranks().world
    if world > 1 and command not in ON_RANKS:
        raise HardwareError(
            f"Command {command} runs in one process",
            got=f"{world} processes",
            need="1; train, finetune, bench comm and data build --executor rank share their work",
            try_=f"tilewright {command}, without torchrun; or unset WORLD_SIZE",
        )


class LazyGroup(click.Group):
    """A group that lists its commands from the table and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        check_one_process(cmd_name)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from tilewright import __version__

        click.echo(f"tilewright {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train large transformers on little hardware, and show the numbers.

    Begin with `tilewright train`, which trains the default recipe, or `tilewright init`.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: list[str] | None = None) -> None:
    """Run the command line and end the process with the exit code of what happened."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Runs one command of the command line and returns the exit code; an internal error keeps its traceback."""
    state = CliState()
    env.tune_cpu_runtime()
    try:
        result = cli.main(args, prog_name="tilewright", standalone_mode=False, obj=state)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except TilewrightError as error:
        print_once(error)
        if state.verbosity:
            raise
        return error.exit_code
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "tilewright"
        print_once(ConfigError(error.format_message(), try_=f"{command} --help"))
        return EXIT_INPUT
    except (KeyboardInterrupt, click.Abort):
        click.echo("\nstopped", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) is gone: nothing left to say, and Python must not say it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except OSError as error:  # of a path that was typed: commands ask what is there in many places
        if not is_of_path(error):
            raise
        print_once(path_error(os.fsdecode(error.filename), got=error.strerror or ""))
        if state.verbosity:
            raise
        return EXIT_INPUT
    except RuntimeError as error:  # of several ranks: a connection that broke because another one ended
        if not is_of_others(error):
            raise
        return 1
