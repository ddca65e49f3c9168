"""How much faster a model with a quarter of its FFN and heads cut is at one cached token than the whole one, in one
runtime and format: of the default shape, and of one whose time is that of its weights.

Weights are those of one step: speed does not depend on them. Each model is written once in each format. Then both are
open, each in a process of its own, and take turns: in each turn each answers some tokens behind 256 others, of which
the least time counts. A slow moment of the machine falls on both. The ratio is the median over turns. Beside it
stand the bytes of weights that a token reads: their ratio is what a runtime without a cost of its own would reach.
That cost is of each runtime

    fixed = t_whole - weights_whole (t_whole - t_cut) / (weights_whole - weights_cut)

The file is written after each runtime of each shape. Latencies mean something on a quiet machine only.

python -m benchmarks.compress.token_speed --work FOLDER [--turns 15] [--threads 2] [--shapes cpu_50m,default]
    [--targets onnx-int8,gguf-q4_0]
"""

import multiprocessing
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import machine_kind, parser_of, write_result
from benchmarks.compress.prune_stages import Study
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.held_out_rise import parameters
from tilewright.compress.budget.stage_runs import run_stage, stage_recipe, write_model
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.targets import find_targets
from tilewright.compress.export_run import quiet_converters
from tilewright.compress.prove.consumer_session import CACHED_AT, ConsumerSession, Request
from tilewright.compress.prove.graphs.onnx_runtime import OnnxRuntime
from tilewright.compress.prove.llama_cpp import LlamaCpp
from tilewright.compress.prove.torch_model import TorchModel
from tilewright.compress.prune.prune import prune

CLAIM = "a model with a quarter of its FFN and heads cut answers a cached token at least 1.2x as fast as the whole one"
TARGETS = "onnx,onnx-int8,gguf-f16,gguf-q8_0,gguf-q4_0"
OWN = {
    "own, fp32 eager": ("fp32", False), "own, bf16 eager": ("bf16", False), "own, bf16 compiled": ("bf16", True),
}  # fmt: skip
"""Our decoder: dtype, compiled."""
SESSIONS: Mapping[str, type[ConsumerSession]] = {"onnxruntime": OnnxRuntime, "llama.cpp": LlamaCpp}
TOKENS = 5
"""In a turn."""
PLAIN = {
    "train.steps": 1, "train.global_batch_size": 2, "train.micro_batch_size": 2, "train.compile": "off",
    "train.eval_interval": 0, "train.eval_batches": 1, "train.sample_tokens": 0, "precision.mode": "fp32",
    "log.report": False, "energy.idle_seconds": 0, "data.max_bytes": 4_000_000, "data.seq_len": 2 * CACHED_AT,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "default": {
        "model.dim": 256, "model.num_layers": 6, "model.num_heads": 4, "model.tie_embeddings": True,
        "data.vocab_size": 4096,
    },
    "cpu_50m": {
        "model.dim": 512, "model.num_layers": 12, "model.num_heads": 8, "model.ffn_dim": 1408,
        "data.vocab_size": 16384,
    },
}  # fmt: skip
CUT = {"ffn": 0.25, "heads": 0.25}


def answer(kind: type[ConsumerSession], request: Request, ids_S: np.ndarray, pipe: Connection) -> None:
    """A child's work: a session that is open, and the least seconds of some tokens each time that it is asked."""
    session = kind(request)
    session.cached_token_s(ids_S)
    while pipe.recv():
        pipe.send(min(session.cached_token_s(ids_S) or 0.0 for _ in range(TOKENS)))


@contextmanager
def opened(kind: type[ConsumerSession], request: Request, ids_S: np.ndarray) -> Iterator[Connection]:
    """A session in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=answer, args=(kind, request, ids_S, theirs))
    child.start()
    theirs.close()  # so that a child that fails ends the wait for its answer
    try:
        yield ours
        ours.send(False)
    finally:
        ours.close()
        child.join(10)
        child.kill()


def in_turns(
    kind: type[ConsumerSession], requests: Mapping[str, Request], ids_S: np.ndarray, turns: int
) -> dict[str, list[float]]:
    """Seconds of a cached token of each, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in requests}
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(opened(kind, request, ids_S)) for name, request in requests.items()}
        for number in range(turns + 1):
            for name, pipe in pipes.items():
                pipe.send(True)
                seconds = pipe.recv()
                if number:  # the first turn prepares
                    found[name].append(seconds)
    return found


def weights_read(model: Any) -> int:
    """Weights that a token reads: all but the rows of an embedding that is no head."""
    table = 0 if model.config.tie_embeddings else model.config.vocab_size * model.config.dim
    return parameters(model) - table


def compared(seconds: Mapping[str, list[float]], read: Mapping[str, int]) -> dict[str, Any]:
    """The ratio of turns, and what the runtime costs without a weight.

    Example:
        >>> found = compared({"whole": [3.0, 6.0], "cut": [2.0, 4.0]}, {"whole": 200, "cut": 100})
        >>> found["ratio"], found["whole"], found["fixed_s"]
        (1.5, 3.0, 1.0)
    """
    ratios = [whole / cut for whole, cut in zip(seconds["whole"], seconds["cut"], strict=True)]
    least = {name: min(those) for name, those in seconds.items()}
    per_weight = (least["whole"] - least["cut"]) / (read["whole"] - read["cut"])
    fixed = least["whole"] - per_weight * read["whole"]
    return {"ratio": median(ratios), "ratios": ratios, **least, "fixed_s": fixed}


def of_shape(name: str, args: Namespace) -> Iterator[dict[str, Any]]:
    """What is known of the whole model and its cut after each runtime."""
    work = args.work / name
    study = Study.of_settings(work, 1, PLAIN | SHAPES[name] | {"run.threads": args.threads})
    whole = study.source.model
    cut = prune(whole, CUT, importance="l1").model  # type: ignore[arg-type]
    folder = work / "models" / "cut"
    write_model(study.source, cut, folder)
    recipe = stage_recipe(study.source, "cut", work, folder=folder, taught=False, steps=1)
    sources = {"whole": study.source, "cut": open_to_export(run_stage(recipe, study.source))}
    read = {"whole": weights_read(whole), "cut": weights_read(cut)}
    rows = next(iter(next(iter(study.batches.values()))))["input_ids"]
    ids_S = rows[0, : CACHED_AT + 1].numpy()
    found: dict[str, Any] = {
        "weights_read": read,
        "weights_ratio": read["whole"] / read["cut"],
        "head_share": whole.config.vocab_size * whole.config.dim / read["whole"],  # type: ignore[attr-defined]
        "runtimes": {},
    }
    for runtime, kind, requests in runtimes(sources, work, args):
        found["runtimes"][runtime] = compared(in_turns(kind, requests, ids_S, args.turns), read)
        row = found["runtimes"][runtime]
        print(f"{name}, {runtime}: {row['ratio']:.2f}x", *(f"{ratio:.2f}" for ratio in row["ratios"]), flush=True)
        yield found


def runtimes(
    sources: Mapping[str, ExportSource], work: Path, args: Namespace
) -> Iterator[tuple[str, type[ConsumerSession], dict[str, Request]]]:
    """Each runtime and format with the artefacts of both models, which are written if they are not there."""
    for target in find_targets(args.targets, "--targets"):
        requests = {}
        for which, source in sources.items():
            path = work / f"{which}-{target.file.format(run=which)}"
            if not path.exists():
                with quiet_converters():
                    target.write(source, path)
            requests[which] = Request(str(path), "", "", args.threads)
        yield target.name, SESSIONS[target.consumer.name], requests
    for name, (dtype, compiled) in OWN.items():
        requests = {}
        for which, source in sources.items():
            folder = work / f"{which}-hf"
            write_model(source, source.model, folder)
            section = source.recipe.model.model_copy(update={"kind": "decoder", "weights": "load"})
            options = {"section": section.model_dump(), "vocab_size": source.tokenizer.vocab_size, "weights": ""}
            options |= {"dtype": dtype, "compile": compiled}
            requests[which] = Request(str(folder), "", "", args.threads, options=options)
        yield name, TorchModel, requests


def main() -> None:
    """Measure, and write the result."""
    parser = parser_of(__doc__, turns=15, threads=2, shapes="cpu_50m,default", targets=TARGETS)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    facts = {"cut": CUT, "turns": args.turns, "tokens": TOKENS, "threads": args.threads}
    shapes: dict[str, Any] = {}
    for name in args.shapes.split(","):
        for found in of_shape(name, args):
            shapes[name] = found
            write_result(f"token_speed_{machine_kind()}", CLAIM, facts | {"shapes": shapes})


if __name__ == "__main__":
    main()
