"""Writes the table of supported models, docs/reference/model-support.md, from the record of the zoo's tests.

`make support` runs all of them, keeps what came out in tests/zoo/outcomes.json, and writes the page. Tests hold page,
record and expectations in agreement.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "zoo" / "outcomes.json"
PAGE = ROOT / "docs" / "reference" / "model-support.md"

CHECKS = {
    "numbers": "converted to each of the six modes, forward and backward are those of FP32 within the format's error",
    "rewritten input": "buffers that are written again, also where autograd counts no writes, are read again",
    "copies": "`deepcopy` and `torch.save` give the same model, which is independent",
    "FP8 coverage": "in `fp8_tile` nine tenths of the weights of the layers' matrices have 8-bit operands",
    "routers": "what chooses between experts is found, computes in FP32, and nothing else is taken for it",
    "packing": "documents packed into rows are as if alone",
    "layer_major": "the layer-major executor has the losses of the standard one",
    "plan": "the planned peak of a larger sibling is within 15 % of a dry run's, or the plan says that it is not known",
    "run and export": "`tilewright train` runs, and transformers reads the weights of its last checkpoint",
    "config": "an exported config.json says what the model's own says",
    "FP8 export": '`checkpoint.export_format = "fp8"` writes four fifths of the matrices in FP8; they are read again',
    "FP8 in transformers": "transformers reads the same model from that folder",
}
"""Name of a check -> what it asks; the columns of the page."""
TITLES = {
    "causal": "Causal language models",
    "experts": "Mixtures of experts",
    "state space": "State spaces and recurrences",
    "masked": "Masked language models",
    "vision": "Image classifiers",
    "audio": "Audio",
    "encoder-decoder": "Encoder and decoder",
}
WORDS = {"works": "yes", "refused": "refused", "defect": "defect", "failed": "FAILED"}


class Notes:
    """Remarks, numbered in the order in which they are first used."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The number that stands for a remark."""
        return f" [{self.numbers.setdefault(text, len(self.numbers) + 1)}]" if text else ""


def page(record: Mapping[str, Any]) -> str:
    """The page for a record."""
    families, notes = record["families"], Notes()
    lines = [
        "# Supported models",
        "",
        f"What {len(families)} families of transformers {record['transformers']} do here, each as a tiny model with",
        "random weights on a CPU. Made by `make support` from tests in `tests/zoo`, so every cell is a test.",
        "",
        "- *yes*: it works. A number leads to a remark below.",
        "- *refused*: an error says what was got, what is needed and what to try.",
        "- *defect*: it is known not to work; the number says why.",
        "- \u2013: does not apply.",
        "",
        *(f"- **{name}**: {text}." for name, text in CHECKS.items()),
    ]
    for kind, title in TITLES.items():
        members = {name: family for name, family in families.items() if family["kind"] == kind}
        lines += ["", f"## {title}", "", *table(members, notes)]
    lines += ["", "## Remarks", "", *(f"{number}. {text}" for text, number in notes.numbers.items())]
    return "\n".join(lines) + "\n"


def table(families: Mapping[str, Any], notes: Notes) -> list[str]:
    """A row for each family, a column for each check that one of them has."""
    checks = [name for name in CHECKS if any(variants(family["checks"], name) for family in families.values())]
    lines = ["| family | " + " | ".join(checks) + " |", "|---" * (len(checks) + 1) + "|"]
    for name, family in families.items():
        cells = [cell(variants(family["checks"], check), notes) for check in checks]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def variants(checks: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Outcomes of a check by variant; '' where it has none."""
    return {key.partition("/")[2]: outcome for key, outcome in checks.items() if key.partition("/")[0] == name}


def cell(outcomes: Mapping[str, Any], notes: Notes) -> str:
    """One outcome, or those of the variants that differ from what most of them have."""
    if not outcomes:
        return "\u2013"
    texts = {variant: WORDS[row["state"]] + notes.mark(row.get("why", "")) for variant, row in outcomes.items()}
    kinds: Sequence[str] = sorted(set(texts.values()), key=lambda text: -list(texts.values()).count(text))
    rest = [f"{variant}: {text}" for variant, text in texts.items() if text != kinds[0]]
    return "; ".join([kinds[0], *rest])


def main() -> None:
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
