"""The default job: what each change since recipe `cpu_10m` is worth in bits per byte at equal seconds, three seeds.

Rungs are tried one on top of the other. How many steps a rung gets is fixed in STEPS, so that all take about as many
seconds; how many they take is measured in turns (`--calibrate`) and stands in the result. What a run reaches depends on
its steps alone, so the runs themselves may share the machine. Each is kept in `results/default_job_runs.jsonl` as it
ends, and a later call makes those that are missing on this text (it depends on the packages that are installed). The
result has the runs of all texts; how far a rung is above the default is said of pairs on one text.

python -m benchmarks.runs.default_job --calibrate
python -m benchmarks.runs.default_job [--rungs adamw default adamw:3e-3 ...] [--seeds 3]
"""

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, Stolen, machine_kind, parser_of, spread, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.run_command import held_out, rows, step_rows, train_command
from benchmarks.run_command import train as train_run
from benchmarks.turns import ratio
from tilewright.core.config.load import load_recipe
from tilewright.core.units import bits_per_byte
from tilewright.training.assemble import prepare_data

CLAIM = "the default job reaches 2.0 bits per byte held out in 5 minutes, mean of three seeds (aim: 1.85)"
RUNS = KeptRows(RESULTS / "default_job_runs.jsonl")

SMALL_STEPS = {"data.seq_len": "256", "train.micro_batch_size": "16"}
SMALL_VOCAB = SMALL_STEPS | {"data.vocab_size": "4096"}
SMALL_MODEL = SMALL_VOCAB | {"model.dim": "256", "model.num_heads": "4"}
LINEAR = SMALL_MODEL | {"optim.schedule": "wsd", "optim.decay_fraction": "0.5", "optim.min_lr_ratio": "0.0"}
ADAMW = LINEAR | {"optim.lr": "1e-3"}
RUNGS: dict[str, tuple[str, dict[str, str]]] = {
    "start": ("cpu_10m", {}),
    "steps": ("cpu_10m", SMALL_STEPS),
    "vocabulary": ("cpu_10m", SMALL_VOCAB),
    "width": ("cpu_10m", SMALL_MODEL),
    "schedule": ("cpu_10m", LINEAR),
    "adamw": ("cpu_10m", ADAMW),
    "default": ("default", {"train.global_batch_size": "16", "train.micro_batch_size": "16"}),
}
WORDS = {
    "start": "AdamW 2e-3, cosine; 6 layers of 320, vocabulary 8192, steps of 16 x 512 tokens",
    "steps": "steps of 16 x 256 tokens: twice as many",
    "vocabulary": "vocabulary of 4096: the head is half as wide",
    "width": "256 wide",
    "schedule": "constant rate, then linear to zero over the last half",
    "adamw": "AdamW's rate tuned: 1e-3",
    "default": "Muon for the matrices",
}
STEPS = {
    "start": 214, "steps": 456, "vocabulary": 552, "width": 730, "schedule": 730, "adamw": 730, "default": 600,
}  # fmt: skip
"""Of a run: as many seconds for all, by their seconds per step."""


def arguments(rung: str) -> tuple[str, dict[str, object]]:
    """Recipe and settings of a rung; `RUNG:RATE` is the rung at another learning rate."""
    name, _, rate = rung.partition(":")
    recipe, settings = RUNGS[name]
    return recipe, settings | ({"optim.lr": rate} if rate else {})


def step_seconds(rung: str, steps: int, folder: Path) -> float:
    """Median seconds of a step, the first five left out."""
    trained = step_rows(train(rung, 0, steps, folder))
    return statistics.median(row["step_s"] + row["wait_s"] for row in trained if row["step"] > 5)


def train(rung: str, seed: int, steps: int, folder: Path, threads: int = 0) -> Path:
    """One run through the command line; its folder."""
    name = f"{rung.replace(':', '_')}-{seed}-{steps}"
    settings = {
        "run.dir": folder, "run.name": name, "run.seed": seed, "train.steps": steps, "train.eval_interval": 0,
        "train.eval_batches": 16, "train.sample_tokens": 0, "run.threads": threads,
    }  # fmt: skip
    recipe, more = arguments(rung)
    train_run(train_command(recipe, more | settings))
    return folder / name


def calibrate(rounds: int, steps: int) -> None:
    """Measure seconds per step of all rungs in turns, and write them."""
    samples: dict[str, list[float]] = {rung: [] for rung in RUNGS}
    with Stolen() as stolen, tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for rung in RUNGS:
                samples[rung].append(step_seconds(rung, steps, Path(folder) / str(turn)))
                print(f"round {turn + 1}: {rung:<12} {samples[rung][-1]:.3f} s per step", flush=True)
    results = {rung: spread(times) for rung, times in samples.items()}
    over = ratio(samples["default"], samples["adamw"])
    write_result(
        f"default_job_steps_{machine_kind()}",
        "a Muon step takes at most 1.15 of AdamW's",
        {"unit": "seconds per step", **results, "default over adamw": over, "stolen_share": stolen.share},
    )


def run_seconds() -> dict[str, float]:
    """Seconds of training per run of each rung, from the calibration of this kind of machine; empty without one."""
    path = RESULTS / f"default_job_steps_{machine_kind()}.json"
    if not path.exists():
        return {}
    seconds = json.loads(path.read_text())["results"]
    return {rung: STEPS[rung] * seconds[rung]["median"] for rung in RUNGS}


def bits_of(run: Path) -> float:
    """Bits per byte over all domains."""
    domains = held_out(run).values()
    nats = sum(domain["loss"] * domain["tokens"] for domain in domains)
    return bits_per_byte(nats, sum(domain["bytes"] for domain in domains))


def known_runs(text: str = "") -> list[dict]:
    """The runs that are there, on this text or on any."""
    return RUNS.of(text=text) if text else RUNS.all()


def text_of(summary: dict) -> str:
    """Names the text, whatever tokenizer and rows were made of it."""
    return f"{summary['bytes']} bytes in {summary['docs']} documents"


def main() -> None:
    """Calibrate, or make the runs that are missing and write the result."""
    parser = parser_of(__doc__, rounds=3, steps=25, seeds=3, threads=0)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--rungs", nargs="+", default=list(RUNGS), help="names of rungs, or RUNG:RATE")
    args = parser.parse_args()
    if args.calibrate:
        calibrate(args.rounds, args.steps)
        return
    text = text_of(prepare_data(load_recipe("default", {}, environ={}).recipe).summary)
    for seed in range(args.seeds):
        for rung in args.rungs:
            wanted = {"rung": rung, "seed": seed, "steps": STEPS[rung.partition(":")[0]], "text": text}
            if RUNS.of(**wanted):
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = train(rung, seed, wanted["steps"], Path(folder), args.threads)
                tokens = [row["tokens"] for row in rows(run / "metrics.jsonl") if "tokens" in row][-1]
                text_of_run = text_of(json.loads((run / "data.json").read_text()))
                RUNS.add(wanted | {"bits_per_byte": bits_of(run), "tokens": tokens, "text": text_of_run})
    write_result(f"default_job_{machine_kind()}", CLAIM, summary(known_runs()))


def summary(runs: list[dict]) -> dict:
    """Bits per byte by rung, of all seeds and texts; and by how much each rung is above the default, run by run."""
    results: dict = {"unit": "bits per byte, held out", "texts": sorted({run["text"] for run in runs})}
    default = {(run["text"], run["seed"]): run["bits_per_byte"] for run in runs if run["rung"] == "default"}
    seconds = run_seconds()
    order = list(RUNGS)
    for rung in sorted({run["rung"] for run in runs}, key=lambda rung: (order.index(rung.partition(":")[0]), rung)):
        here = [run for run in runs if run["rung"] == rung and run["steps"] == STEPS[rung.partition(":")[0]]]
        if here:
            here.sort(key=lambda run: (run["text"], run["seed"]))
            found = spread([run["bits_per_byte"] for run in here])
            pairs = [(run["bits_per_byte"], default.get((run["text"], run["seed"]))) for run in here]
            found["above_default"] = [other - mine for other, mine in pairs if mine is not None]
            mean = statistics.fmean(found["samples"])
            name, _, rate = rung.partition(":")
            words = {"words": f"the same, learning rate {rate}" if rate else WORDS[name], "seconds": seconds.get(name)}
            results[rung] = words | found | {"mean": mean, "steps": here[0]["steps"], "tokens": here[0]["tokens"]}
    return results


if __name__ == "__main__":
    main()
