"""The command line's surface, frozen: a change here is a change for users and belongs in CHANGELOG.md."""

import click
import pytest

import tilewright
from tilewright.cli.app import COMMANDS, cli

PUBLIC = {
    "CheckpointError",
    "ConfigError",
    "ControllerSettings",
    "ConversionReport",
    "DataError",
    "Decoder",
    "DecoderConfig",
    "DeepSeekAdam",
    "DropReason",
    "DynamicScaler",
    "FP8Quantizer",
    "IntegerQuantizer",
    "FitError",
    "GradClip",
    "HardwareError",
    "Kernels",
    "LRSchedule",
    "Loaded",
    "Machine",
    "Muon",
    "NumericsError",
    "Plan",
    "Policy",
    "PrecisionController",
    "QuantizedWeights",
    "Recipe",
    "RecordFilter",
    "Rule",
    "RunResult",
    "StepHook",
    "TilewrightError",
    "UnknownFitError",
    "__version__",
    "add_lora",
    "convert",
    "dynamic_quantize",
    "detect_machine",
    "evaluating",
    "explain",
    "fp8_choice",
    "load_adapter",
    "load_fp8_weights",
    "load_lora_decoder",
    "load_recipe",
    "merge_lora",
    "plan",
    "save_adapter",
    "set_mode",
    "train",
}

SURFACE = {
    "init": ["--force", "--help", "--list", "--quiet", "--to", "--verbose", "recipe"],
    "doctor": ["--device", "--help", "--json", "--parallel", "--quiet", "--verbose", "recipe"],
    "plan": [
        *("--by", "--compare", "--device-memory", "--disk-memory", "--fastest", "--help", "--host-memory", "--html"),
        *("--json", "--largest", "--link", "--nodes"),
        *("--on", "--out", "--quiet", "--verbose", "--why", "--world", "recipe"),
    ],
    "simulate": [
        *("--attention", "--checkpoint-every", "--checkpoint-stall", "--data", "--dgrad", "--documents", "--dp"),
        *("--fail-every", "--forward", "--help", "--html", "--json"),
        *("--ladder", "--layers", "--lengths", "--link", "--max-length", "--message", "--microbatches", "--node"),
        *(
            "--optimizer",
            "--packing",
            "--pp",
            "--quiet",
            "--recover",
            "--reduce",
            "--schedule",
            "--seeds",
            "--slow",
            "--split",
        ),
        *("--table", "--verbose", "--virtual-stages", "--wgrad"),
    ],
    "compress": [
        *("--budget", "--controls", "--cut", "--dry-run", "--goal", "--help", "--importance", "--json"),
        *("--no-refit", "--out", "--quiet", "--steps", "--targets", "--time-limit", "--tries", "--verbose", "run"),
    ],
    "search": [
        *("--block-steps", "--candidates", "--context", "--dry-run", "--help", "--json", "--kinds", "--limits"),
        *("--no-uniform", "--out", "--quiet", "--rows", "--score-rows", "--steps", "--verbose", "run"),
    ],
    "data": ["--help"],
    "precision": ["--help"],
    "train": ["--dry-run", "--help", "--quiet", "--verbose", "recipe"],
    "finetune": ["--dry-run", "--help", "--how", "--passes", "--quiet", "--verbose", "data", "model"],
    "merge": ["--format", "--help", "--out", "--quiet", "--verbose", "run"],
    "eval": [
        *("--apply-chat-template", "--base", "--batch-size", "--batches", "--help", "--include-path", "--json"),
        *("--limit", "--num-fewshot", "--quiet", "--tasks", "--verbose", "run"),
    ],
    "chat": [
        *("--chat-template", "--device", "--dtype", "--help", "--message", "--quiet", "--seed", "--stop", "--system"),
        *("--temperature", "--threads", "--tokens", "--top-k", "--top-p", "--verbose", "name"),
    ],
    "serve": [
        "--allow-host",
        "--allow-origin",
        *("--api-key", "--cache", "--chat-template", "--chunk", "--concurrent", "--device", "--dtype", "--help"),
        *("--host", "--max-body", "--max-tokens", "--port", "--quiet", "--threads", "--timeout", "--verbose"),
        *("--waiting", "name"),
    ],
    "generate": [
        *("--help", "--prompt", "--quiet", "--seed", "--temperature", "--threads", "--tokens", "--top-k"),
        *("--verbose", "run"),
    ],
    "export": [
        *("--help", "--json", "--method", "--no-proof", "--normalized-text", "--out", "--quiet", "--threads"),
        *("--time-limit", "--to"),
        *("--verbose", "--without-tokenizer", "run"),
    ],
    "inspect": ["--diff", "--help", "--json", "--quiet", "--schema", "--verbose", "target"],
    "report": ["--help", "--open", "--quiet", "--verbose", "run"],
    "watch": ["--help", "--open", "--port", "--quiet", "--verbose", "runs"],
    "bench": [
        *("--against", "--help", "--json", "--out", "--quiet", "--ranks", "--sizes", "--steps", "--verbose"),
        *("recipe", "what"),
    ],
}


SEARCH = ["--batches", "--budget", "--force", "--help", "--json", "--out", "--quiet", "--rows", "--run", "--time"]
BUILD = ["--executor", "--help", "--json", "--out", "--processes", "--quiet", "--verbose", "settings"]
INSPECT = ["--diff", "--help", "--json", "--most", "--quiet", "--record", "--reject", "--run", "--step", "--verbose"]
SKIP = ["--help", "--quiet", "--steps", "--verbose", "run"]
SUBCOMMANDS = {
    "data": {"build": BUILD, "inspect": [*INSPECT, "folder"], "skip": SKIP},
    "precision": {"search": sorted([*SEARCH, "--verbose", "--warmup", "recipe"])},
}


def surface(command: click.Command) -> list[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    names = []
    for parameter in command.get_params(context):
        is_option = isinstance(parameter, click.Option)
        names.append(max(parameter.opts, key=len) if is_option else str(parameter.name))
    return sorted(names)


def test_commands_and_options():
    context = click.Context(cli)
    found = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = surface(command)
    assert found == SURFACE


def test_commands_of_groups():
    context = click.Context(cli)
    groups = {name: command for name in COMMANDS if isinstance(command := cli.get_command(context, name), click.Group)}
    found = {name: {key: surface(sub) for key, sub in group.commands.items()} for name, group in groups.items()}
    assert found == SUBCOMMANDS


def test_the_list_says_what_each_command_says():
    context = click.Context(cli)
    for name, (_, text) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        first = (command.help or "").split("\n\n")[0].replace("\n", " ").strip()
        assert first == text


def test_public_names():
    assert set(tilewright.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(tilewright, name) is not None


def options(command, context):
    """Of a command, and of the commands in it."""
    yield from (param for param in command.params if isinstance(param, click.Option))
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from options(command.get_command(context, name), context)


def test_numbers_that_nothing_can_hold_are_refused():
    """Where click takes them, torch or the arithmetic behind an option ends in a traceback, or the process in none."""
    checked = set()
    for option in options(cli, click.Context(cli)):
        wrong = {"--seed": "9223372036854775808", "--threads": "100000"}.get(option.opts[0])
        for value in ["nan"] * isinstance(option.type, click.types.FloatParamType) + [wrong] * bool(wrong):
            with pytest.raises(click.BadParameter):
                option.type.convert(value, option, None)
            checked.add(option.opts[0])
    assert {"--seed", "--threads", "--temperature", "--time-limit"} <= checked
