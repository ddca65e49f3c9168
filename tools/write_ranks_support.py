"""Writes the support matrix, docs/reference/support-matrix.md: what works on one process, on copies, in shards, in
shards with copies and in stages, from the marks of the tests that hold it.

    @pytest.mark.support("muon", "copies", "dp_shard")           # the test holds these cells
    @pytest.mark.support("layer_major", "dp_shard", refused=True)  # it holds that they are refused, with an error

`make reference` after a change of marks; a test holds the committed page equal to what this writes. Tests are read and
not run: that they pass is the matter of the suite.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "reference" / "support-matrix.md"

MESHES = {
    "one": "1 process",
    "copies": "copies (`dp_replicate`)",
    "shards": "shards (`dp_shard`)",
    "hsdp": "both (HSDP)",
    "stages": "stages (`pp`)",
    "experts_spread": "experts (`ep`)",
    "tensor": "matrices (`tp`)",
}
FEATURES = {
    "Models": {
        "decoder": "tilewright's decoder",
        "experts": "mixture of experts",
        "hf": "Hugging Face models",
        "lora": "adapters (LoRA)",
        "lora_fp8": "adapters on an FP8 base",
    },
    "Precision": {
        "bf16": "`bf16_mixed`",
        "fp16": "`pure_fp16`, with loss scaling",
        "fp8": "`fp8_tile`",
        "codes": "weights gathered as FP8 codes (`parallel.param_gather`)",
        "integers": "training for integers (`int8`, `int4`, `int4_a8`)",
        "controller": "precision controller",
    },
    "Optimizer": {
        "adam": "AdamW, moments in FP32, BF16 and 8 bits",
        "muon": "Muon",
        "clip": "clipping and loss scale decide as on one process",
    },
    "Memory": {
        "checkpointing": "activation checkpointing, each mode",
        "inputs": "8-bit checkpoint inputs",
        "tiled": "tiled MLP",
        "compiled": "compiled layers",
        "offload": "`parallel.cpu_offload`",
        "layer_major": "layer-major executor",
        "plan": "a run is planned, and refused where it cannot fit",
    },
    "Training": {
        "run": "a run has the losses and evaluations of one process",
        "accumulation": "micro-batches, uneven ones too",
        "dropout": "dropout, masks of its own on each rank",
        "evaluation": "evaluation",
        "finetune": "`finetune`",
        "pairs": "preferences (DPO)",
        "teacher": "a teacher (`[distill]`)",
        "others": "other commands under torchrun",
    },
    "Checkpoints": {
        "resume": "resumes from its checkpoint",
        "reshard": "resumes with another number of processes",
        "commands": "`inspect`, `eval`, `generate`, `chat`, `merge`, `export` read it",
        "export": "`checkpoint.export_hf`",
        "corruption": "copies that differ are named and not saved",
    },
    "Recovery": {
        "kill": "`kill -9` of a rank, with `--max-restarts`",
        "signal": "SIGTERM of one rank stops all",
        "memory": "out of memory on one rank: all try again",
        "alone": "a rank that fails alone inside a step is named, all end",
        "stopped": "a stopped rank is named",
        "hangs": "a rank that hangs, in any phase, is named, all end",
    },
}
NOT_THERE = frozenset({
    *((feature, mesh) for feature in ("offload", "codes") for mesh in ("one", "copies")),
    ("corruption", "one"), ("corruption", "shards"),
    ("alone", "one"), ("stopped", "one"), ("hangs", "one"), ("others", "one"),
})  # fmt: skip
"""Cells that mean nothing."""


@dataclass(frozen=True)
class Mark:
    """A mark of a test.

    Args:
        feature: key of `FEATURES`.
        mesh: key of `MESHES`.
        refused: the test holds that it is refused.
        test: its file below `tests`, and its name.
    """

    feature: str
    mesh: str
    refused: bool
    test: str


def marks(folder: Path = TESTS) -> list[Mark]:
    """The marks of all tests.

    Raises:
        ValueError: a feature or mesh that is not known.
    """
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.support(" in text:
            found += [mark for mark in _marks_in(ast.parse(text), path.relative_to(folder).as_posix())]
    known = {key for features in FEATURES.values() for key in features}
    for mark in found:
        if mark.feature not in known or mark.mesh not in MESHES:
            raise ValueError(f"{mark.test}: support({mark.feature!r}, {mark.mesh!r}) is in no row or column")
    return found


def _marks_in(tree: ast.Module, file: str) -> Iterator[Mark]:
    for node in tree.body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.support":
                feature, *meshes = (ast.literal_eval(argument) for argument in call.args)
                refused = any(word.arg == "refused" and ast.literal_eval(word.value) for word in call.keywords)
                yield from (Mark(feature, mesh, refused, f"{file}::{node.name}") for mesh in meshes)


class Numbers:
    """Tests, numbered in the order in which they are first named."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, tests: Sequence[str]) -> str:
        """Their numbers, as they stand in a cell."""
        return ", ".join(str(self.of.setdefault(test, len(self.of) + 1)) for test in tests)


def cell(found: Sequence[Mark], numbers: Numbers) -> str:
    """What is known of a feature on a mesh, and by which tests.

    Raises:
        ValueError: one test says that it works, and another that it is refused.
    """
    if not found:
        return "untested"
    if len({mark.refused for mark in found}) > 1:
        raise ValueError(f"works and is refused: {found}")
    word = "refused" if found[0].refused else "yes"
    return f"{word} [{numbers([mark.test for mark in found])}]"


def page(found: Sequence[Mark]) -> str:
    """The page for these marks."""
    numbers = Numbers()
    lines = [
        "# Support matrix",
        "",
        "What works on one process and on several, made by `make reference` from marks of the tests: the number in a",
        "cell is that of the test below which holds it. How to run on several processes:",
        "[the guide](../how-to/several-processes.md).",
        "",
        "- *yes*: a test holds it.",
        "- *refused*: a test holds that it ends with an error before work begins, which says what to do instead.",
        "- *untested*: nothing is known; it may work.",
        "- –: does not apply.",
    ]
    for heading, features in FEATURES.items():
        lines += ["", f"## {heading}", "", f"| | {' | '.join(MESHES.values())} |", "|---" * (len(MESHES) + 1) + "|"]
        for key, text in features.items():
            by_mesh = {mesh: [mark for mark in found if (mark.feature, mark.mesh) == (key, mesh)] for mesh in MESHES}
            cells = ["–" if (key, mesh) in NOT_THERE else cell(by_mesh[mesh], numbers) for mesh in MESHES]
            lines.append(f"| {text} | {' | '.join(cells)} |")
    lines += ["", "## Tests", ""]
    lines += [f"{number}. `tests/{test}`" for test, number in numbers.of.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(marks()), encoding="utf-8")


if __name__ == "__main__":
    main()
