"""Exports of a trained run, each proven in its runtime, by rounding and by GPTQ; and of a run trained for integers.

python -m benchmarks.compress.export_default RUN [--threads 2] [--qat-steps 200] [--targets ...] [--out FOLDER]

With `--qat-steps N` the run's model is trained for N more steps in 4 bits with the run itself as the teacher, and
exported as it was trained; and, as the control, for the same steps without rounding. Every number is from
`exports.json`; what is wanted is a row with "pass", "miss" or "not measured". Latencies mean something on a quiet
machine only.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import machine_kind, parser_of, write_result
from tilewright.cli.load_run import open_to_export
from tilewright.compress.export.targets import find_targets
from tilewright.compress.export_run import export_run
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.core.config.load import load_recipe
from tilewright.core.log import say
from tilewright.training.session import train

CLAIM = "exports of a default model run in their runtimes as fast, as small and as near to FP32 as asked for"
EIGHT = ("onnx-int8", "openvino-int8", "gguf-q8_0")
FOUR = ("gguf-q4_0", "executorch-8da4w")
WIDE = ("onnx", "gguf-f16", "aoti")
ALL = ("hf", "fp8", *WIDE, *EIGHT, *FOUR)
Row = dict[str, Any]


def exports(run: Path, targets: str, method: str, out: Path, threads: int | None) -> Row:
    """The record of one export, baselines among it."""
    say(f"{run.name}: {targets} by {method}")
    source = open_to_export(run, method=method)  # type: ignore[arg-type]
    limits = ConsumerLimits.of_this_machine(1200)
    return export_run(source, find_targets(targets), out / f"{run.name}-{method}", threads=threads, limits=limits)


def distilled(run: Path, steps: int, out: Path, rules: str) -> Path:
    """A run of `steps` steps that begins with the weights of `run` and has it as its teacher.

    Args:
        run: the run's folder.
        steps: of training.
        out: folder of the new run.
        rules: precision rules of integers; "[]" for the control, the same steps without rounding.
    """
    source = open_to_export(run)
    name = "control" if rules == "[]" else "qat"
    folder = out / f"{name}-start"
    source.model.save_hf(folder)
    shutil.copy(run / "tokenizer.json", folder / "tokenizer.json")
    settings = {
        "model.path": folder, "model.weights": "load", "precision.rules": rules, "distill.teacher": run.resolve(),
        "distill.weight": 0.5, "distill.temperature": 2.0, "train.steps": steps, "run.dir": out, "run.name": name,
        "data.tokenizer": run / "tokenizer.json", "optim.lr": source.recipe.optim.lr / 10,
        "optim.warmup_steps": min(20, steps // 5), "checkpoint.resume": "never", "model.kind": source.recipe.model.kind,
    }  # fmt: skip
    recipe = load_recipe(run / "run.toml", {name: str(value) for name, value in settings.items()}, environ={})
    return train(recipe).run_dir or out / name


def short(row: Row, fp32_bytes: float, base: dict[str, float] | None = None) -> Row:
    """What is kept of an artefact's row. `base`: loss by domain that counts as 100 %; None: that of its own proof."""
    losses = row.get("loss") or {}
    change = {
        name: 100 * (both["consumer"] / (base or {}).get(name, both["fp32"]) - 1) for name, both in losses.items()
    }
    names = (
        "state",
        "reason",
        "bytes",
        "kl",
        "top1",
        "prefill_s",
        "cached_token_s",
        "cached_at",
        "token_ids",
        "write_s",
    )
    kept = {name: row[name] for name in names if name in row}
    kept |= {"of_fp32": row["bytes"] / fp32_bytes} if row.get("bytes") else {}
    return kept | {"loss_change_percent": change, "notes": row.get("notes", [])}


def latency(row: Row, tokens: int) -> float | None:
    """Seconds of one cached token, or of a prefill."""
    if tokens == 1:
        return row.get("cached_token_s")
    return (row.get("prefill_s") or {}).get(str(tokens))


INT8 = ("rtn", "onnx-int8")
"""Method and target that all claims of INT8 are of: its speed and its loss are of one artefact."""
FOUR_BITS = (("qat", "gguf-q4_0"), ("gptq", "gguf-q4_0"), ("rtn", "gguf-q4_0"))
"""The same of four bits: the first of these that was measured."""
WIDE_OF = {"onnx-int8": "onnx", "gguf-q4_0": "gguf-f16"}
"""The same runtime's target in FP32 or F16: what of a speed-up is the runtime's and not that of the bits."""


def wanted(methods: dict[str, Row], baselines: dict[str, Row]) -> Iterator[Row]:
    """A row for each claim: name, limit, value, verdict, and of which artefact it is. Without a limit it is for reading
    beside the one before."""
    rows = {(m, t): row for m, found in methods.items() for t, row in found.items() if row.get("state") == "ran"}
    four = next((key for key in FOUR_BITS if key in rows), FOUR_BITS[-1])

    def over(base: Row, key: tuple[str, str], tokens: int) -> float | None:
        slow, fast = latency(base, tokens), latency(rows.get(key, {}), tokens)
        return slow / fast if slow and fast else None

    for tokens, limits in ((1, (3.7, 1.5)), (32, (3.7, 1.2))):
        wide = ("rtn", WIDE_OF[INT8[1]])
        of, fp32 = " ".join(INT8), baselines.get("fp32 eager", {})
        yield _least(f"INT8 over FP32 eager, {tokens} tokens", limits[0], over(fp32, INT8, tokens), of)
        yield _beside(f"of it the runtime: its FP32 over FP32 eager, {tokens} tokens", over(fp32, wide, tokens), wide)
        yield _beside(
            f"of it the bits: INT8 over its FP32, {tokens} tokens", over(rows.get(wide, {}), INT8, tokens), INT8
        )
        compiled = baselines.get("bf16 compiled", {})
        yield _least(f"INT8 over compiled BF16, {tokens} tokens", limits[1], over(compiled, INT8, tokens), of)
        yield _beside(f"FP32 in the runtime over compiled BF16, {tokens} tokens", over(compiled, wide, tokens), wide)
        f16 = ("rtn", WIDE_OF[FOUR_BITS[0][1]])
        yield _beside(f"GGUF F16 over compiled BF16, {tokens} tokens", over(compiled, f16, tokens), f16)
    wide = ("rtn", WIDE_OF[four[1]])
    fp32 = baselines.get("fp32 eager", {})
    yield _least("4 bits over FP32 eager, 1 token", 5.0, over(fp32, four, 1), " ".join(four))
    yield _beside("of it the runtime: its F16 over FP32 eager, 1 token", over(fp32, wide, 1), wide)
    yield _beside("of it the bits: 4 bits over its F16, 1 token", over(rows.get(wide, {}), four, 1), four)
    yield _most("INT8: worst domain's loss, percent", 0.5, _worst(rows.get(INT8)), " ".join(INT8))
    control = methods.get("control", {}).get("gguf-f16")
    value = _over_control(rows.get(four), control) if four[0] == "qat" else _worst(rows.get(four))
    yield _most(
        "4 bits: worst domain's loss, over that of as many unrounded steps, percent", 1.0, value, " ".join(four)
    )
    for target, limit in (("onnx-int8", 0.27), ("gguf-q4_0", 0.16), ("executorch-8da4w", 0.21)):
        sizes = {key: row.get("of_fp32") for key, row in rows.items() if key[1] == target}
        yield _most(f"{target}: bytes over FP32", limit, *_smallest(sizes))
    for name, some, limit in (("F32 and F16", WIDE, 1e-5), ("8 bits", EIGHT, 5e-3), ("4 bits", FOUR, 5e-2)):
        found = {key: row["kl"] for key, row in rows.items() if key[1] in some and key[0] not in ("qat", "control")}
        worst = max(found, key=found.__getitem__, default=None)
        yield _most(f"{name}: largest KL", limit, found.get(worst), " ".join(worst) if worst else "")
    counted = {key: row["token_ids"] for key, row in rows.items() if row.get("token_ids")}
    share = {key: ids["equal"] / ids["documents"] for key, ids in counted.items()}
    least = min(share, key=share.__getitem__, default=None)
    yield _least("documents with equal token ids, share", 1.0, share.get(least), " ".join(least) if least else "")
    slow = {key: row.get("write_s") for key, row in rows.items()}
    slowest = max((key for key in slow if slow[key]), key=lambda key: slow[key], default=None)
    yield _most("slowest export, seconds", 60.0, slow.get(slowest), " ".join(slowest) if slowest else "")


def _worst(row: Row | None) -> float | None:
    return max(row["loss_change_percent"].values(), default=None) if row else None


def _over_control(row: Row | None, control: Row | None) -> float | None:
    """The worst domain's loss over that of the control, in percent. Both changes are from the same run."""
    if not row or not control:
        return None
    plain = control["loss_change_percent"]
    changes = row["loss_change_percent"]
    return max((100 * ((1 + changes[name] / 100) / (1 + plain[name] / 100) - 1) for name in changes), default=None)


def _beside(name: str, value: float | None, of: tuple[str, str]) -> Row:
    return {"what": name, "value": value, "of": " ".join(of), "verdict": "-" if value is not None else "not measured"}


def _smallest(found: dict[tuple[str, str], float | None]) -> tuple[float | None, str]:
    known = {key: value for key, value in found.items() if value is not None}
    best = min(known, key=known.__getitem__, default=None)
    return (None, "") if best is None else (known[best], " ".join(best))


def _least(name: str, limit: float, value: float | None, of: str) -> Row:
    verdict = "not measured" if value is None else "pass" if value >= limit else "miss"
    return {"what": name, "at least": limit, "value": value, "of": of, "verdict": verdict}


def _most(name: str, limit: float, value: float | None, of: str) -> Row:
    verdict = "not measured" if value is None else "pass" if value <= limit else "miss"
    return {"what": name, "at most": limit, "value": value, "of": of, "verdict": verdict}


def measure(run: Path, targets: str, threads: int | None, qat_steps: int, out: Path) -> Row:
    """All records as one result."""
    methods: dict[str, Row] = {}
    rounded = exports(run, targets, "rtn", out, threads)
    size, base = rounded["fp32_bytes"], {}
    for row in rounded["baselines"]:
        if row["name"] == "fp32 eager":
            base = {name: both["fp32"] for name, both in (row.get("loss") or {}).items()}
    baselines = {row["name"]: row for row in rounded["baselines"]}
    asked = {target.name for target in find_targets(targets)}
    methods["rtn"] = {r["target"]: short(r, size) for r in rounded["artefacts"] if r["target"] in asked}
    four = ",".join(name for name in FOUR if name in asked)
    if four:
        found = exports(run, four, "gptq", out, threads)
        methods["gptq"] = {r["target"]: short(r, size) for r in found["artefacts"] if r["target"] in FOUR}
    if four and qat_steps:
        trained = distilled(run, qat_steps, out, '[{compute = "int4_a8"}]')
        found = exports(trained, four, "auto", out, threads)
        methods["qat"] = {r["target"]: short(r, size, base) for r in found["artefacts"] if r["target"] in FOUR}
        found = exports(distilled(run, qat_steps, out, "[]"), "gguf-f16", "rtn", out, threads)
        methods["control"] = {r["target"]: short(r, size, base) for r in found["artefacts"]}
    kept = {name: short(row, size) for name, row in baselines.items()}
    result = {"run": run.name, "checkpoint": rounded["checkpoint"], "machine": rounded["machine"], "baselines": kept}
    return result | {"qat_steps": qat_steps, "artefacts": methods, "wanted": list(wanted(methods, baselines))}


def main() -> None:
    """Measure and write the result."""
    parser = parser_of(__doc__, qat_steps=0, targets=",".join(ALL))
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="folder of the artefacts; a temporary one is deleted at the end")
    args = parser.parse_args()
    if args.out is None:
        with tempfile.TemporaryDirectory(prefix="export-default-") as folder:
            result = measure(args.run, args.targets, args.threads, args.qat_steps, Path(folder))
    else:
        result = measure(args.run, args.targets, args.threads, args.qat_steps, args.out)
    for row in result["wanted"]:
        value = "" if row["value"] is None else f"{row['value']:.4g}"
        limit = next(
            (f"{sign} {row[side]}" for side, sign in (("at least", ">="), ("at most", "<=")) if side in row), ""
        )
        print(f"{row['verdict']:<13}{row['what']:<45}{value:>10} {limit:<8} {row['of']}")
    write_result(f"export_default_{machine_kind()}", CLAIM, json.loads(json.dumps(result)))


if __name__ == "__main__":
    main()
