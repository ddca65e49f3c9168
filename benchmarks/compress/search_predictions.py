"""Whether what `tilewright search` predicts is so: latency by its table, and the order of shapes by predicted loss.

For each seed a small run is trained until its parts matter, and its library, scores and latency table are made. Then 20
random shapes of the library are built and timed beside what the table says, and 12 others are trained with the run as
their teacher: the order of their losses beside the predicted one, that by FLOPs alone, and random ones.

Each part is kept when it ends; the same command continues in its folder. With `--size recipe` the run is that of the
recipe, and a folder of `benchmarks.compress.search_uniform` is continued.

python -m benchmarks.compress.search_predictions --work FOLDER [--seeds 1] [--steps 600] [--block-steps 60]
    [--shape-steps 60] [--threads 1]
"""

import random
import statistics
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.common import parser_of, write_result
from benchmarks.compress.search_uniform import CONTEXT, NO_CHANGES, Study
from tilewright.compress.budget.call_seconds import machine_clock
from tilewright.compress.search.choose_shapes import ChosenShape
from tilewright.compress.search.library.assemble_decoder import config_with
from tilewright.compress.search.search_settings import KINDS
from tilewright.compress.search.table.latency import model_calls
from tilewright.models.build import decoder_shapes, init_weights, materialize

CLAIM = (
    "latency by the table of a search is within 10 % of the measured one for 20 random shapes; the rank correlation of "
    "12 shapes' predicted with their trained loss is at least 0.6"
)
TIMED, RANKED = 20, 12
ORDERS = 2000
"""Random ones, of which the middle 95 % say what chance gives."""
SMALL = {
    "model.dim": 128,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.ffn_dim": 384,
    "data.max_bytes": "3MB",
    "data.vocab_size": 1024,
    "data.seq_len": 128,
    "precision.mode": "fp32",
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "train.eval_batches": 2,
    "train.compile": "off",
    "checkpoint.interval_minutes": 60,
}
SMALL_CONTEXT = 128
ASKED = ("recipe", "size", "steps", "kinds", "block_steps", "shape_steps", "threads")


def drawn(study: Study, generator: random.Random, number: int) -> list[ChosenShape]:
    """Random shapes of the library, each choice of a part as likely."""
    options = study.search.options()
    found = []
    while len(found) < number:
        chosen = tuple(
            generator.choice([option for option in options if option.place == place]) for place in study.search.choices
        )
        if any(option.attends for option in chosen):
            found.append(ChosenShape(chosen))
    return found


def timed(study: Study, shape: ChosenShape, context: int) -> dict[str, Any]:
    """Latency of a shape, predicted over measured."""
    search, rest = study.search, study.search.rest()
    names = {str(option.place): option.name for option in shape.options}
    model = decoder_shapes(config_with(search.config, search.choices_named(names)), study.source.model.kernels)
    materialize(model, "cpu")
    init_weights(model, 0)
    latency = search.timed(model_calls(model, context))
    return {
        "token": shape.cost("token", rest) / latency.token.least,
        "prefill": shape.cost("prefill", rest) / latency.prefill.least,
        "steady": latency.steady,
    }


def table(study: Study, context: int) -> dict[str, Any]:
    """All of them, and the largest errors."""
    rows = [
        study.case(f"latency {number}", lambda shape=shape: timed(study, shape, context))
        for number, shape in enumerate(drawn(study, random.Random(study.seed), TIMED))
    ]
    worst = {name: max(abs(row[name] - 1) for row in rows) for name in ("token", "prefill")}
    middle = {name: statistics.median(abs(row[name] - 1) for row in rows) for name in ("token", "prefill")}
    return {"largest error": worst, "median error": middle, "shapes": rows}


def ranks(study: Study) -> dict[str, Any]:
    """Spearman's correlation of trained losses with predicted ones and with FLOPs, and what random orders reach."""
    generator = random.Random(study.seed + 100)
    shapes = drawn(study, generator, RANKED)
    rows = [study.search.record["candidates"][study.search.train_shape(shape)] for shape in shapes]
    losses = [row["rise"] for row in rows]
    by = {"predicted": [shape.rise for shape in shapes], "flops": [-row["costs"]["flops"] for row in rows]}
    found: dict[str, Any] = {name: float(spearmanr(values, losses).statistic) for name, values in by.items()}
    chance = [float(spearmanr(generator.sample(range(RANKED), RANKED), losses).statistic) for _ in range(ORDERS)]
    middle = statistics.quantiles(chance, n=40)
    errors = [row["error"] for row in rows]
    return found | {"random": [middle[0], middle[-1]], "losses": losses, "errors": errors, "by": by}


def main() -> None:
    """Measure, and write the result after each seed."""
    parser = parser_of(
        __doc__, recipe="cpu_10m", limits="token=80%", kinds=",".join(KINDS), threads=1, seeds=1, steps=600,
        block_steps=60, shape_steps=60,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", choices=("small", "recipe"), default="small")
    args = parser.parse_args()
    changes, context = (SMALL, SMALL_CONTEXT) if args.size == "small" else (NO_CHANGES, CONTEXT)
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        study = Study(args, seed, changes, context)
        study.search.measure()
        seeds[str(seed)] = {"table": table(study, context), "ranks": study.case("ranks", lambda s=study: ranks(s))}
        asked = {name: getattr(args, name) for name in ASKED}
        write_result("search_predictions", CLAIM, {**asked, "clock": machine_clock()[0], "seeds": seeds})


if __name__ == "__main__":
    main()
