"""Whether layers of their own shape, found by `tilewright search`, answer faster than decoders whose layers are alike.

For each seed the recipe `cpu_10m` is trained and searched; the found shape is trained from scratch on as many
tokens, and so are six designs or more whose layers are alike, of as many FLOPs per token: width, depth and heads for
keys and values are varied, in one also a window, and the FFN takes what is left. Beside the best of these: held-out
loss, and latency of a cached token behind 512 others in tilewright's own runtime.
`benchmarks.compress.search_predictions` holds the search to what it predicts.

Each training is kept when it ends, and the same command continues in its folder. Latency is measured when all are
trained: all decoders of a seed in one process, in turns, so that a ratio is of two calls that follow each other.

python -m benchmarks.compress.search_uniform --work FOLDER [--steps 160] [--seeds 3] [--limits token=50%]
    [--kinds ffn,heads] [--block-steps N] [--shape-steps 0] [--threads 2] [--rounds 40] [--only SEED]

`--shape-steps`: of shapes that begin with the run's weights; 0: a quarter of `--steps`. `--only 1` trains what seed 1
needs and no more, so that seeds can be trained side by side.
"""

import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.common import parser_of, write_result
from benchmarks.kept_rows import KeptCases
from benchmarks.turns import in_turns
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.call_seconds import machine_clock
from tilewright.compress.budget.held_out_rise import parameters, row_losses_of
from tilewright.compress.search.search_run import RECIPE, LayerSearch
from tilewright.compress.search.search_settings import KINDS, LayerSearchSettings
from tilewright.compress.search.table.latency import as_served
from tilewright.core.config.load import load_recipe
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops
from tilewright.training.components.recipe_data import prepare_data
from tilewright.training.session import train

CLAIM = "searched layers answer a cached token at 512 at least 12 % faster than the best uniform decoder of equal FLOPs"
CONTEXT, LEAST = 512, 6
Row = dict[str, Any]
DESIGNS = (
    (256, 5, 4, 4), (320, 3, 5, 5), (320, 3, 5, 1), (320, 4, 5, 1), (384, 2, 6, 6), (384, 2, 6, 2), (320, 3, 5, 1, 32),
    (384, 2, 6, 6, 32),
)  # fmt: skip
"""Width, layers, query and key/value heads, and a window of all layers: what a window alone gives. At the limit's FLOPs
these have room for an FFN; deeper ones learned less in as many steps (docs/log.md, 2026-11-28)."""
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})
_WIDTH = 32
"""FFN widths are multiples of this."""


def processor_seconds() -> float:
    """Seconds of the processor that this process took, and its children that have ended: trainings of several seeds may
    run side by side."""
    return sum(os.times()[:4])


class Study:
    """A run of one seed, its search, and what is trained beside it; each kept when it ends.

    Args:
        args: of the command line.
        seed: of the run and its data.
        changes: settings of the run beside those of its recipe.
        context: tokens before the cached one.
    """

    def __init__(
        self, args: Namespace, seed: int, changes: Mapping[str, Any] = NO_CHANGES, context: int = CONTEXT
    ) -> None:
        self.args, self.seed, self.folder = args, seed, args.work / f"seed-{seed}"
        self.run = self.case("run", lambda: self.of_parent(changes))
        self.source = open_to_export(self.trained("run", args.recipe, changes))
        settings = LayerSearchSettings.of(
            args.limits, args.kinds, context=context, block_steps=args.block_steps, steps=args.shape_steps
        )
        began = processor_seconds()
        self.search = LayerSearch(
            self.source, settings, self.folder / "searched", open_to_export, lambda text: print(text, flush=True)
        )
        self.opening_s = processor_seconds() - began

    def trained(self, name: str, recipe: str | Path, settings: Mapping[str, Any]) -> Path:
        """The folder of a run from scratch, at its last step."""
        own: dict[str, Any] = {"run.dir": self.folder, "run.name": name, "run.seed": self.seed, "train.minutes": 0}
        own |= {"train.steps": self.args.steps, "run.threads": self.args.threads, "log.report": False}
        own |= {"train.eval_interval": 0, "train.sample_tokens": 0, "energy.idle_seconds": 0} | dict(settings)
        done = train(load_recipe(recipe, {key: str(value) for key, value in own.items()}, environ={}))
        assert done.run_dir is not None
        if done.step < self.args.steps:  # a signal; the run is saved
            raise SystemExit(f"{name} was stopped at step {done.step}; the same command continues")
        return done.run_dir

    def case(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured under this name, in this command or one before it."""
        return KeptCases(self.folder / "cases.json").of(name, measure)

    def of_parent(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds of the processor that training the run takes, once its data is prepared."""
        load = load_recipe(self.args.recipe, {key: str(value) for key, value in changes.items()}, environ={})
        prepare_data(load.recipe)
        began = processor_seconds()
        self.trained("run", self.args.recipe, changes)
        return {"training_s": processor_seconds() - began}

    def of_run(self, folder: Path) -> dict[str, Any]:
        """Held-out loss and counted costs of a trained run."""
        model = open_to_export(folder).model
        counted = {
            "flops": float(count_flops(model.config, CONTEXT).forward),
            "parameters": float(parameters(model)),
        }
        return {"run": folder.name, "loss": row_losses_of(model, self.search.batches).loss, **counted}

    def latencies(self, runs: Mapping[str, str]) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
        """Seconds of a prefill and of a cached token of each trained run, turn by turn; and the bytes of its cache.

        Args:
            runs: folders by name.
        """
        models = {name: as_served(open_to_export(self.folder / run).model) for name, run in runs.items()}
        ids_BS = torch.zeros(1, CONTEXT, dtype=torch.int64)
        caches = {name: model.new_cache(1, CONTEXT + 1) for name, model in models.items()}

        def call(name: str, length: int) -> Callable[[], None]:
            def run() -> None:
                models[name].next_token_logits(ids_BS[:, :length], caches[name])
                caches[name].advance(-length)

            return run

        rounds, (_, clock) = self.args.rounds, machine_clock()
        with torch.no_grad(), ExitStack() as modes:
            for model in models.values():
                modes.enter_context(evaluation(model))
            prefill = in_turns({name: call(name, CONTEXT) for name in models}, rounds, clock=clock)
            for cache in caches.values():
                cache.advance(CONTEXT)
            token = in_turns({name: call(name, 1) for name in models}, 10 * rounds, clock=clock)
        return {"prefill": prefill, "token": token}, {name: cache.num_bytes for name, cache in caches.items()}

    def found(self) -> dict[str, Any]:
        """The shape that was found, trained from scratch; and the seconds of the processor that finding it took."""
        began = processor_seconds()
        self.search.run()
        searched = processor_seconds()
        found = self.of_run(self.trained("found", self.search.out / RECIPE, {}))
        took = {"search_s": self.opening_s + searched - began, "training_s": processor_seconds() - searched}
        return found | took

    def uniform(self, design: tuple[int, ...], flops: float) -> dict[str, Any]:
        """A design whose layers are alike, trained from scratch; {} where it has no room for an FFN."""
        dim, layers, heads, groups, window = (*design, 0)[:5]
        vocab = self.source.tokenizer.vocab_size
        shape = {"dim": dim, "num_layers": layers, "num_heads": heads, "num_kv_heads": groups, "sliding_window": window}
        width = ffn_width(DecoderConfig.of(vocab_size=vocab, ffn_dim=_WIDTH, **shape), flops)
        if width < _WIDTH:
            return {}
        settings = {f"model.{name}": value for name, value in (shape | {"ffn_dim": width}).items()}
        name = "-".join(map(str, design))
        return {"ffn_dim": width, **self.of_run(self.trained(name, self.args.recipe, settings))}


def ffn_width(config: DecoderConfig, flops: float) -> int:
    """The FFN width with which a decoder computes as many FLOPs per token, to a multiple of 32."""
    without = count_flops(replace(config, ffn_dim=_WIDTH), CONTEXT).forward
    each = count_flops(replace(config, ffn_dim=2 * _WIDTH), CONTEXT).forward - without
    return _WIDTH * round(1 + (flops - without) / each)


def trained_by(study: Study) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The found shape and the uniform designs of one seed, trained.

    Raises:
        SystemExit: too few designs have room for an FFN at the FLOPs of the found shape.
    """
    found = study.case("found", study.found)
    uniform = {str(one): study.case(str(one), lambda one=one: study.uniform(one, found["flops"])) for one in DESIGNS}
    alike = {name: row for name, row in uniform.items() if row}
    if len(alike) < LEAST:
        raise SystemExit(f"{len(alike)} designs have room for an FFN at {found['flops']:.3g} FLOPs, of {LEAST}")
    return found, alike


def beside(found: Row, other: Row, seconds: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> Row:
    """The found shape over a design: shares of loss and counts, and ratios of seconds, turn by turn."""
    shares = {key: found[key] / other[key] - 1 for key in ("loss", "flops", "parameters")}
    ratios = {what: spread_of_ratio(of["found"], of[name]) for what, of in seconds.items()}
    return {"name": name, **shares, **ratios}


def spread_of_ratio(one: Sequence[float], other: Sequence[float]) -> Row:
    """Median of one over the other, turn by turn, with quartiles.

    Example:
        >>> spread_of_ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
        {'median': 1.0, 'quartiles': [0.5, 1.5], 'turns': 3}
    """
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "quartiles": [low, high], "turns": len(ratios)}


def of_seed(study: Study) -> dict[str, Any]:
    """All of one seed: the found shape beside the design of the least loss, and beside the one that answers fastest.

    The second is the fastest of those whose loss is at most the found shape's; None where no design's is.
    """
    found, alike = trained_by(study)
    runs = {"found": found["run"], **{name: row["run"] for name, row in alike.items()}}
    seconds, caches = study.latencies(runs)
    medians = {what: {name: statistics.median(of) for name, of in by.items()} for what, by in seconds.items()}
    for name, row in {"found": found, **alike}.items():
        row |= {what: by[name] for what, by in medians.items()} | {"cache": caches[name]}
    best = min(alike, key=lambda name: alike[name]["loss"])
    as_good = [name for name, row in alike.items() if row["loss"] <= found["loss"]]
    fastest = min(as_good, key=lambda name: alike[name]["token"], default=None)
    return {
        "run": study.run,
        "search over training the run": found["search_s"] / study.run["training_s"],
        "found": found,
        "uniform": alike,
        "beside the best": beside(found, alike[best], seconds, best),
        "beside the fastest as good": fastest and beside(found, alike[fastest], seconds, fastest),
    }


def main() -> None:
    """Measure, and write the result."""
    parser = parser_of(
        __doc__, recipe="cpu_10m", limits="token=50%", kinds=",".join(KINDS), threads=2, seeds=3, steps=160,
        shape_steps=0, rounds=40,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--block-steps", type=int)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    if args.only is not None:
        trained_by(Study(args, args.only))
        return
    studies = {str(seed): Study(args, seed) for seed in range(args.seeds)}
    for study in studies.values():
        trained_by(study)
    asked = {name: getattr(args, name) for name in ("recipe", "steps", "limits", "kinds", "block_steps", "rounds")}
    facts = {**asked, "clock": machine_clock()[0]}
    seeds = {name: of_seed(study) for name, study in studies.items()}
    write_result("search_uniform", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()
