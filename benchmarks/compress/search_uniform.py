"""Whether layers of their own shape, found by `tilewright search`, answer faster than decoders whose layers are alike.

For each seed the recipe `cpu_10m` is trained and searched; the found shape is trained from scratch on as many
tokens, and so are six designs or more whose layers are alike, of as many FLOPs per token: width, depth and heads for
keys and values are varied, and the FFN takes what is left. Beside the best of these: held-out loss, and latency of a
cached token behind 512 others in tilewright's own runtime. `benchmarks.compress.search_predictions` holds the search to
what it predicts.

The file is written after each part; the same command continues in its folder.

python -m benchmarks.compress.search_uniform --work FOLDER [--steps 160] [--seeds 3] [--limits token=80%]
    [--kinds ffn,heads] [--block-steps 100] [--shape-steps 0] [--threads 2]

`--shape-steps`: of shapes that begin with the run's weights; 0: a quarter of `--steps`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.common import write_result
from benchmarks.kept_rows import KeptCases
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.measure import row_losses_of
from tilewright.compress.budget.timing import machine_clock
from tilewright.compress.search.search_run import RECIPE, LayerSearch
from tilewright.compress.search.settings import KINDS, LayerSearchSettings
from tilewright.compress.search.table.costs import measured_costs
from tilewright.compress.search.table.latency import model_latency
from tilewright.core.config.load import load_recipe
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops
from tilewright.training.session import train

CLAIM = "searched layers answer a cached token at 512 at least 12 % faster than the best uniform decoder of equal FLOPs"
CONTEXT, LEAST = 512, 6
DESIGNS = (
    (320, 6, 5, 5), (320, 6, 5, 1), (384, 4, 6, 6), (384, 5, 6, 2), (256, 8, 4, 4), (256, 10, 4, 1), (448, 3, 7, 7),
    (320, 5, 5, 5), (320, 8, 5, 1),
)  # fmt: skip
"""Width, layers, query and key/value heads."""
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})
_WIDTH = 32
"""FFN widths are multiples of this."""


class Study:
    """A run of one seed, its search, and what is trained beside it; each kept when it ends.

    Args:
        args: of the command line.
        seed: of the run and its data.
        changes: settings of the run beside those of its recipe.
        context: tokens before the cached one.
    """

    def __init__(
        self, args: argparse.Namespace, seed: int, changes: Mapping[str, Any] = NO_CHANGES, context: int = CONTEXT
    ) -> None:
        self.args, self.seed, self.folder = args, seed, args.work / f"seed-{seed}"
        self.source = open_to_export(self.trained("run", args.recipe, changes))
        settings = LayerSearchSettings.of(
            args.limits, args.kinds, context=context, block_steps=args.block_steps, steps=args.shape_steps
        )
        self.search = LayerSearch(
            self.source, settings, self.folder / "searched", open_to_export, lambda text: print(text, flush=True)
        )

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

    def of_run(self, folder: Path) -> dict[str, Any]:
        """Held-out loss and costs of a trained run."""
        model = open_to_export(folder).model
        costs = measured_costs(model, *model_latency(model, CONTEXT, machine_clock()[1]), CONTEXT)
        return {"loss": row_losses_of(model, self.search.batches).loss, **costs}

    def found(self) -> dict[str, Any]:
        """The shape that was found, trained from scratch."""
        self.search.run()
        return self.of_run(self.trained("found", self.search.out / RECIPE, {}))

    def uniform(self, design: tuple[int, ...], flops: float) -> dict[str, Any]:
        """A design whose layers are alike, trained from scratch; {} where it has no room for an FFN."""
        dim, layers, heads, groups = design
        vocab = self.source.tokenizer.vocab_size
        shape = {"dim": dim, "num_layers": layers, "num_heads": heads, "num_kv_heads": groups}
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


def of_seed(study: Study) -> dict[str, Any]:
    """All of one seed."""
    found = study.case("found", study.found)
    uniform = {str(one): study.case(str(one), lambda one=one: study.uniform(one, found["flops"])) for one in DESIGNS}
    alike = {name: row for name, row in uniform.items() if row}
    if len(alike) < LEAST:
        raise SystemExit(f"{len(alike)} designs have room for an FFN at {found['flops']:.3g} FLOPs, of {LEAST}")
    name, best = min(alike.items(), key=lambda item: item[1]["loss"])
    beside = {
        "best": name,
        "loss": found["loss"] / best["loss"] - 1,
        **{cost: found[cost] / best[cost] - 1 for cost in ("token", "prefill", "flops", "parameters")},
    }
    return {
        "found": found,
        "uniform": alike,
        "beside the best": beside,
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipe", default="cpu_10m")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limits", default="token=80%")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--block-steps", type=int, default=100)
    parser.add_argument("--shape-steps", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        seeds[str(seed)] = of_seed(Study(args, seed))
        asked = {name: getattr(args, name) for name in ("recipe", "steps", "limits", "kinds", "block_steps", "threads")}
        facts = {**asked, "clock": machine_clock()[0]}
        write_result("search_uniform", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()
