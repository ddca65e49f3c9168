"""Writes the reference pages that are made from the code: settings, variables, commands, recipes, public names, rules
of the report.

`make reference` after a change; a test holds the committed pages equal to what this writes.
"""

import tomllib
from pathlib import Path

import click
from pydantic import BaseModel

import tilewright
from tilewright.cli.app import COMMANDS, cli
from tilewright.compress.prove.compare_answers import CLEAR
from tilewright.compress.prove.tolerance import FEWEST_CLEAR, TOLERANCES
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe, shipped_recipes
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.toml import RECIPES, toml_text
from tilewright.core.env import VARIABLES
from tilewright.core.units import format_count
from tilewright.data.engine.build_settings import DataBuild
from tilewright.models.build import decoder_config
from tilewright.models.decoder.flops import count_parameters
from tilewright.report.verdict.judge import MOOT, RULES
from tilewright.report.verdict.rule import MIN_RECORDS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def configuration() -> str:
    """One table per section: setting, default, what it wants, what it means."""
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe, made from the schema in `tilewright.core.config.recipe`. In a recipe settings are",
        "grouped by `[section]`; on the command line they are written `--section.field value`.",
        "`tilewright inspect --schema` prints the JSON schema for editors.",
    ]
    return "\n".join([*lines, *_settings(Recipe)]) + "\n"


def data_build() -> str:
    """The settings of a data.toml, as those of a recipe."""
    lines = [
        "# Settings of a data build",
        "",
        "Every setting of a `data.toml`, made from the schema in `tilewright.data.engine.build_settings`;",
        "[how to build a dataset](../how-to/build-data.md). `none`: the rule is off. Papers: Gopher is Rae et al. 2021",
        "(arXiv 2112.11446), C4 is Raffel et al. 2020 (arXiv 1910.10683), FineWeb is Penedo et al. 2024 (arXiv",
        "2406.17557), CCNet is Wenzek et al. 2020 (arXiv 1911.00359), Moore-Lewis is Moore and Lewis 2010 (ACL",
        "P10-2041).",
    ]
    return "\n".join([*lines, *_settings(DataBuild)]) + "\n"


def _settings(root: type[BaseModel]) -> list[str]:
    """A table of each section of a schema."""
    lines: list[str] = []
    for section in setting_names.sections(root):
        lines += ["", f"## [{section}]", "", "| setting | default | value | meaning |", "|---|---|---|---|"]
        for item in setting_names.fields(root):
            if item.path.startswith(section + "."):
                name = item.path.partition(".")[2]
                cells = (f"`{name}`", f"`{toml_text(item.info.default)}`", item.wants, item.doc)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def environment() -> str:
    """The table of environment variables."""
    lines = [
        "# Environment variables",
        "",
        "All variables that tilewright reads; `tilewright.core.env` is the only place that does. An empty variable",
        "counts as not set. A setting from the environment beats the recipe and gives way to the command line.",
        "",
        "| variable | sets | values | meaning |",
        "|---|---|---|---|",
    ]
    for row in VARIABLES:
        sets = f"`{row.sets}`" if "." in row.sets else row.sets
        lines.append(f"| `{row.name}` | {sets} | {row.values} | {row.meaning} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The help text of every command, as printed."""
    lines = [
        "# Commands",
        "",
        "`tw` is short for `tilewright`. Exit codes: 0 done, 2 bad input, 3 does not fit, 4 stopped on numerics,",
        "5 hardware, 6 the planner cannot say, 130 interrupted; 1 with a traceback is an internal error, please report",
        "it.",
    ]
    parent = click.Context(cli, info_name="tilewright", terminal_width=88)
    for name in COMMANDS:
        command = cli.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent, info_name=name, terminal_width=88, help_option_names=["-h", "--help"])
        lines += ["", f"## {name}", "", "```text", command.get_help(context), "```"]
        for key, inner in command.commands.items() if isinstance(command, click.Group) else ():
            below = click.Context(inner, context, info_name=key, terminal_width=88, help_option_names=["-h", "--help"])
            lines += ["", f"## {name} {key}", "", "```text", inner.get_help(below), "```"]
    return "\n".join(lines) + "\n"


def recipes() -> str:
    """The shipped recipes: what each builds on, its size, and its first line."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a TOML file. Values come from, in order of precedence: the command line, the environment, the",
        "file, the recipe it `extends`, the schema's default. The shipped recipes:",
        "",
        "| recipe | extends | parameters | precision | what it is |",
        "|---|---|---:|---|---|",
    ]
    for name in shipped_recipes():
        text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
        parent = tomllib.loads(text).get("extends", "")
        recipe = load_recipe(name, environ={}).recipe
        about = text.partition("\n")[0].lstrip("# ")
        cells = (
            f"`{name}`",
            f"`{parent}`" if parent else "",
            "as its folder" if recipe.model.path else format_count(_num_parameters(recipe)),
            f"`{recipe.precision.mode}`",
            about,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *RECIPE_RULES]) + "\n"


def _num_parameters(recipe: Recipe) -> int:
    return count_parameters(decoder_config(recipe.model, recipe.data.vocab_size)).total


RECIPE_RULES = (
    "`tilewright train NAME` trains one, `tilewright plan NAME` predicts its memory and time, and `tilewright init",
    "NAME` copies it here to be edited. Names that begin with `slice` train layer by layer",
    "([how](../how-to/layer-major.md)).",
    "",
    "`extends` names one parent: a path relative to the file, or a shipped recipe. A setting of the file replaces the",
    'parent\'s whole setting; lists and tables are not merged. `"none"` removes an optional setting.',
    "",
    "A relative path in a setting, such as `data.source`, is relative to the folder in which the command is started,",
    "also where a recipe of another folder names it. The run.toml of a run keeps it as an absolute path.",
    "",
    "Unknown sections and settings are errors, and all mistakes of all sources are reported at once, with their lines.",
    "A setting without effect in a recipe is reported before the run starts.",
)

PUBLIC = {
    "Runs": ("load_recipe", "Loaded", "Recipe", "train", "RunResult", "StepHook", "plan", "Plan"),
    "Filters of a data build": ("RecordFilter", "DropReason"),
    "Precision of a model": (
        *("convert", "explain", "set_mode", "evaluating", "Policy", "Rule", "ConversionReport", "DynamicScaler"),
        *("QuantizedWeights", "FP8Quantizer", "IntegerQuantizer", "dynamic_quantize"),
        *("PrecisionController", "ControllerSettings"),
    ),
    "Optimizer": ("DeepSeekAdam", "Muon", "GradClip", "LRSchedule"),
    "LoRA": ("add_lora", "merge_lora", "save_adapter", "load_adapter", "load_lora_decoder", "load_fp8_weights"),
    "Model": ("Decoder", "DecoderConfig"),
    "Machine": ("detect_machine", "Machine", "fp8_choice", "Kernels"),
    "Errors": (
        *("TilewrightError", "ConfigError", "DataError", "CheckpointError", "FitError", "UnknownFitError"),
        *("NumericsError", "HardwareError"),
    ),
}
"""The public names by heading; together they are `tilewright.__all__`."""


def python() -> str:
    """Every public name, with its docstring."""
    lines = [
        "# Python",
        "",
        "The public names of `tilewright`, as in `from tilewright import convert`. Each is imported when it is first",
        "used, so `import tilewright` is fast. What is not here may change without notice.",
    ]
    for heading, names in PUBLIC.items():
        lines += ["", f"## {heading}", "", "```{eval-rst}"]
        for name in names:
            found = getattr(tilewright, name)
            lines.append(f".. {'autoclass' if isinstance(found, type) else 'autofunction'}:: {found.__module__}.{name}")
            lines += ["   :members:"] if isinstance(found, type) and not issubclass(found, Exception) else []
        lines.append("```")
    return "\n".join(lines) + "\n"


def verdict() -> str:
    """The rules of the report, with their thresholds and where these come from."""
    lines = [
        "# The verdict of a report",
        "",
        "`tilewright report`, the end of `tilewright train` and the head of `report.html` judge a run by these rules,",
        "from the files of the run folder alone. Each rule is a number beside two thresholds. By it a run is good,",
        "worth a look or bad, or not measured: where the number is not recorded, or the run is so short that nothing",
        f"can be said (most rules need {MIN_RECORDS} recorded steps). Nothing is good without a measurement.",
        "",
        "The headline of the report is the gravest of what is bad; else of what is worth a look; else what the run",
        "learned. Of two in the same state the rule further up counts. Of a run that diverged, these are not judged:",
        f"{', '.join(rule.name for rule in MOOT)}. A step that a resumed run repeats counts once.",
        "",
        "| rule | number | worth a look from | bad from |",
        "|---|---|---|---|",
    ]
    for rule in RULES:
        lines.append(f"| {rule.name} | {rule.measures} | {rule.amount(rule.look)} | {rule.amount(rule.bad)} |")
    lines += ["", "## Why these thresholds", ""]
    for rule in RULES:
        besides = f" Bad whatever the number: {rule.besides}." if rule.besides else ""
        lines.append(f"- **{rule.name}**: {rule.why}{besides}")
    return "\n".join(lines) + "\n"


def export_limits() -> str:
    """How far each artefact of an export may be from its model."""
    lines = [
        "# Limits of exports",
        "",
        "`tilewright export` runs each artefact in its runtime and judges the answer by this table. Beyond a limit the",
        "artefact has failed: so say its state, its badge in the report, and the exit code, 4. All token ids must be",
        "equal, of held-out documents and of 256 odd texts, and so must begin and end of a text, the model's length",
        "and the chat template, where a runtime can tell them.",
        "",
        "- **KL**: mean divergence of the next token's distribution from that of the model, in nats. A run that was",
        "  trained in integers is taken as it was trained, where the artefact holds its codes.",
        "- **KL, stored**: the same from the model with the values that the artefact stores. What is left is the",
        "  runtime's own rounding of activations, so damage shows that four bits would cover.",
        f"- **clear top 1**: of targets at which the model's likeliest token is {CLEAR:g} times as likely as the",
        f"  second, the share with the same likeliest token; judged from {FEWEST_CLEAR} such targets on.",
        "",
        "| target | KL at most | KL, stored, at most | clear top 1 at least | source |",
        "|---|---:|---:|---:|---|",
    ]
    for name, limit in TOLERANCES.items():
        stored = f"{limit.stored:g}" if limit.stored is not None else "-"
        lines.append(f"| `{name}` | {limit.kl:g} | {stored} | {100 * limit.top1:g} % | {limit.source} |")
    lines += [
        "",
        "Measured means are of recipe `default` after 2,000 steps, as in",
        "[export_default_avx512.json](../../benchmarks/results/export_default_avx512.json).",
    ]
    return "\n".join(lines) + "\n"


PAGES = {
    "configuration.md": configuration,
    "data-build.md": data_build,
    "environment.md": environment,
    "commands.md": commands,
    "recipes.md": recipes,
    "python.md": python,
    "verdict.md": verdict,
    "export-limits.md": export_limits,
}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
