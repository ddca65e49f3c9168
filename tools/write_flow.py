"""Writes docs/images/data-flow.svg: the way of the data from recipe and text to the report.

`make reference` after a change; a test holds the committed picture equal to what this writes. Colours follow the
reader's theme, light or dark.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "data-flow.svg"
WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 984, 468, 204, 64
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .name { font-weight: 600; }
  .small { font-size: 11.5px; fill: #59636e; }
  .step { fill: #eef4ff; stroke: #3b6fb6; }
  .file { fill: #fff8e6; stroke: #a8781a; }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.4; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b1; }
    .step { fill: #15243a; stroke: #6ea0e6; }
    .file { fill: #2d2410; stroke: #d2a34a; }
    .arrow { stroke: #9da7b1; }
    .head { fill: #9da7b1; }
  }
"""


@dataclass(frozen=True)
class Box:
    """A step (code) or a file, with its place: column and row of a grid."""

    name: str
    text: str
    column: int
    row: int
    kind: str = "step"

    @property
    def left(self) -> int:
        return 16 + self.column * (BOX_WIDTH + 45)

    @property
    def top(self) -> int:
        return 16 + self.row * (BOX_HEIGHT + 60)


BOXES = {
    "recipe": Box("recipe.toml", "settings, extends", 0, 0, "file"),
    "config": Box("core/config", "one typed Recipe", 1, 0),
    "planner": Box("planner", "memory and time per layer", 2, 0),
    "plan": Box("plan.toml", "each layer's treatment", 3, 0, "file"),
    "text": Box("text", "files, jsonl, parquet", 0, 1, "file"),
    "data": Box("data", "clean, split, tokenise, pack", 1, 1),
    "step": Box("training/executor", "forward, backward, update", 2, 1),
    "loop": Box("training/run", "steps, evaluation, saves", 3, 1),
    "weights": Box("model folder", "config.json, safetensors", 0, 2, "file"),
    "models": Box("models", "layers on the meta device", 1, 2),
    "layers": Box("precision, memory, optim", "formats, offload, AdamW", 2, 2),
    "run": Box("run folder", "metrics, events, checkpoints", 3, 2, "file"),
    "ops": Box("ops, formats", "kernels and their reference", 2, 3),
    "report": Box("report", "report.html, verdict", 3, 3),
}
ARROWS = (
    *(("recipe", "config"), ("config", "planner"), ("planner", "plan")),
    *(("text", "data"), ("data", "step"), ("planner", "step"), ("loop", "step")),
    *(("weights", "models"), ("models", "layers"), ("layers", "step")),
    *(("ops", "layers"), ("loop", "run"), ("run", "report")),
)


def arrow(start: Box, end: Box) -> str:
    """A line between two boxes: from side to side in a row, from edge to edge in a column."""
    middle = BOX_HEIGHT // 2
    if start.row == end.row:
        forward = end.column > start.column
        x1, x2 = (start.left + BOX_WIDTH, end.left - 7) if forward else (start.left, end.left + BOX_WIDTH + 7)
        path = f"M{x1} {start.top + middle} H{x2}"
        tip = (end.left, start.top + middle, 0) if forward else (end.left + BOX_WIDTH, start.top + middle, 180)
    else:
        down = end.row > start.row
        x = start.left + BOX_WIDTH // 2
        y1, y2 = (start.top + BOX_HEIGHT, end.top - 7) if down else (start.top, end.top + BOX_HEIGHT + 7)
        path = f"M{x} {y1} V{y2}"
        tip = (x, end.top, 90) if down else (x, end.top + BOX_HEIGHT, 270)
    head = f'<path class="head" d="M0 0 L-9 -4.5 L-9 4.5 Z" transform="translate({tip[0]} {tip[1]}) rotate({tip[2]})"/>'
    return f'<path class="arrow" d="{path}"/>{head}'


def box(each: Box) -> str:
    """A rectangle with two lines of text."""
    x = each.left + BOX_WIDTH // 2
    return (
        f'<rect class="{each.kind}" x="{each.left}" y="{each.top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text class="name" x="{x}" y="{each.top + 27}" text-anchor="middle">{escape(each.name)}</text>'
        f'<text class="small" x="{x}" y="{each.top + 46}" text-anchor="middle">{escape(each.text)}</text>'
    )


def picture() -> str:
    """The whole drawing."""
    title = "The way of the data: recipe, text and model folder on the left, run folder and report on the right"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        *(arrow(BOXES[start], BOXES[end]) for start, end in ARROWS),
        *(box(each) for each in BOXES.values()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
