"""What the benchmarks of `benchmarks.gpu` must take at least on one H200, written down before anything is measured.

The page docs/explanation/h200.md holds the tables between its marks; they come from the same functions that the
benchmarks write beside their measurements.

python -m benchmarks.plans.floors           # rewrite the page's tables
python -m benchmarks.plans.floors --check   # fail where the page is not what the functions say
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.card.fp8_gpu import LAYERS, RATES, TOKENS, Products
from benchmarks.card.loss_gpu import SHAPE as LOSS_SHAPE
from benchmarks.card.memory_gpu import EIGHT_B, SLICED, floor
from benchmarks.card.step_gpu import StepShape
from benchmarks.common import parser_of, with_section, write_pages
from tilewright.core.config.load import load_recipe
from tilewright.models.build import decoder_config
from tilewright.models.decoder.flops import count_flops, count_parameters

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "h200.md"
COMMAND = "python -m benchmarks.plans.floors"
STEP_PARTS = {
    "linear_bf16_ms": "linear layers' GEMMs, BF16",
    "linear_fp8_ms": "linear layers' GEMMs, FP8",
    "quantise_ms": "quantisation: inputs and output gradients read once, two copies written",
    "attention_ms": "attention's scores and values, BF16 in both",
    "head_ms": "output head, BF16 in both",
    "elementwise_ms": "norms, SwiGLU, residuals",
    "optimizer_ms": "AdamW, FP32 states",
}


def page_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose numbers are on the right."""
    head = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def products() -> list[str]:
    """Three matmuls of a linear layer, and the best that FP8 can be."""
    rows = []
    for inputs, outputs in LAYERS:
        found = Products(TOKENS, inputs, outputs).floor()
        best = found["bf16_floor_ms"] / found["fp8_floor_ms"]
        names = ("bf16_floor_ms", "fp8_products_floor_ms", "quantise_floor_ms")
        rows.append([f"{inputs} to {outputs}", *(f"{found[name]:.2f}" for name in names), f"{best:.2f}x"])
    title = f"Three GEMMs (fprop, dgrad, wgrad) of a linear layer, {TOKENS:,} tokens, in ms:"
    return [title, "", *page_table(["layer", "BF16 and its cast", "FP8", "quantise x, dy, weight", "at best"], rows)]


def step() -> list[str]:
    """A step of the 8B-shaped stack, part by part."""
    shape = StepShape()
    found = shape.roofline()
    title = (
        f"A step of an 8B-shaped decoder of {shape.layers} layers ({shape.dim} wide, MLP {shape.ffn}, "
        f"{shape.rows} x {shape.seq} tokens), in ms:"
    )
    rows = [[text, f"{found[name]:.0f}"] for name, text in STEP_PARTS.items()]
    rows += [
        ["**sum, bf16_mixed**", f"{found['bf16_step_floor_ms']:.0f}"],
        ["**sum, fp8_tile**", f"{found['fp8_step_floor_ms']:.0f}"],
        ["**fp8_tile at best**", f"{found['best_speedup']:.2f}x"],
    ]
    return [title, "", *page_table(["part", "ms"], rows)]


def memory() -> list[str]:
    """Layer-major steps: matmuls beside what crosses the link."""
    cases = {
        "42B, recipe slice_42b_h200": load_recipe("slice_42b_h200", {}, environ={}).recipe,
        "8B, states on the host": load_recipe("cpu_10m", EIGHT_B | SLICED, environ={}).recipe,
    }
    rows = []
    for name, recipe in cases.items():
        number = count_parameters(decoder_config(recipe.model, recipe.data.vocab_size)).total
        tokens = recipe.train.global_batch_size * recipe.data.seq_len
        found = floor(number, tokens)
        at_least = max(found.values())
        rows.append(
            [
                f"{name} ({number / 1e9:.1f}B parameters, {tokens:,} tokens)",
                f"{found['products_s']:.1f}",
                f"{found['states_each_way_s']:.1f}",
                f"{tokens / at_least:,.0f}",
            ]
        )
    title = "A layer-major step with every layer recomputed, 8-bit states crossing the link both ways, in seconds:"
    return [title, "", *page_table(["model", "GEMMs", "states, each way", "tokens/s at most"], rows)]


def loss() -> list[str]:
    """How many steps the loss curves can have."""
    recipe = load_recipe("cpu_10m", LOSS_SHAPE, environ={}).recipe
    config = decoder_config(recipe.model, recipe.data.vocab_size)
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    seconds = tokens * count_flops(config, recipe.data.seq_len).step() / RATES["bf16_flops"]
    number = count_parameters(config).total
    return [
        f"The curves of loss: {number / 1e9:.2f}B parameters, {tokens:,} tokens per step, at least {seconds:.2f} s per "
        f"step in BF16, so at most {240 / seconds:,.0f} steps in the four minutes of each curve.",
    ]


def tables() -> list[str]:
    """What stands between the marks."""
    return [*products(), *step(), *memory(), *loss()]


def main() -> None:
    """Rewrite the page's tables, or check them."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    write_pages({PAGE: with_section(PAGE.read_text(encoding="utf-8"), "floors", tables(), COMMAND)}, check, COMMAND)


if __name__ == "__main__":
    main()
