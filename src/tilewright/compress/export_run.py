"""The exports of a run: each target written, then run in its consumer; the record grows row by row."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from tilewright.compress.export.publish import artefact_bytes, artefact_hash, publish
from tilewright.compress.export.quiet import quiet_converters
from tilewright.compress.export.source import ExportSource
from tilewright.compress.export.target import Target, Written, missing
from tilewright.compress.export.targets import why_not
from tilewright.compress.exports_file import Row, read_exports, write_exports
from tilewright.compress.prove.held_out import ask_held_out
from tilewright.compress.prove.limits import ConsumerLimits
from tilewright.compress.prove.proof import Proof
from tilewright.core.errors import CheckpointError, NumericsError
from tilewright.core.hardware import detect_machine
from tilewright.core.log import get_logger
from tilewright.data.common.progress import ProgressBar

_OURS = "tilewright.compress.prove.torch_model"
BASELINES = (("fp32 eager", "fp32", False), ("bf16 eager", "bf16", False), ("bf16 compiled", "bf16", True))
"""Name, dtype, compiled: of our own model, in a process of its own like every consumer."""


def export_run(
    source: ExportSource,
    targets: Sequence[Target],
    out: Path,
    *,
    prove: bool = True,
    threads: int | None = None,
    limits: ConsumerLimits | None = None,
    on_row: Callable[[Row], object] = lambda row: None,
) -> Row:
    """Write and prove the targets; the record, which is in exports.json too.

    Args:
        source: the opened run.
        targets: at least one.
        out: folder of the artefacts, made where it is missing.
        prove: run each artefact in its consumer, and the baselines.
        threads: of each consumer; None: the recipe's, else the machine's cores.
        limits: of each consumer; None: see `ConsumerLimits.of_this_machine`.
        on_row: called with each baseline's and each artefact's row when it is known.

    Raises:
        NumericsError: a weight is not finite.
        CheckpointError: no target can be written: no format holds the model, or each write failed, on a full disk for
            example. Where one of several fails, its row is "failed" with the reason.
    """
    check_finite(source)
    reasons = {target.name: reason for target in targets if (reason := why_not(target, source)) is not None}
    rows = [_not_written(target, "unavailable", reasons[target.name]) for target in targets if target.name in reasons]
    for row in rows:
        on_row(row)
    if len(rows) == len(targets):
        raise CheckpointError(
            "None of the targets can be written",
            got="\n".join(f"{row['target']}: {row['reason']}" for row in rows),
            need="at least one",
            try_="another --to; hf holds most models",
            where="--to",
        )
    machine = detect_machine("cpu")
    threads = threads or source.recipe.run.threads or machine.physical_cores
    record: Row = {
        "run": source.run.resolve().name,
        "checkpoint": source.checkpoint.name,
        "fp32_bytes": fp32_bytes(source),
        "machine": {
            "cpu": machine.device_name,
            "threads": threads,
            "clock_mhz": _clock(),
            "memory_limit_bytes": None,
            "date": datetime.now(UTC).date().isoformat(),
        },
        "baselines": [],
        "artefacts": _kept(source, targets) + rows,
    }
    with tempfile.TemporaryDirectory(prefix="tilewright-proof-") as folder, ProgressBar("export") as bar:
        proof = None
        if prove:
            bar.phase("held-out rows")
            proof = _proof(source, Path(folder), threads, limits or ConsumerLimits.of_this_machine())
            record["machine"]["memory_limit_bytes"] = proof.limits.memory_bytes
            record["baselines"] = _baselines(source, proof, bar, on_row)
        errors: list[CheckpointError] = []
        possible = [target for target in targets if target.name not in reasons]
        for target in possible:
            try:
                row = _one(source, target, out / target.file.format(run=record["run"]), proof, bar)
            except CheckpointError as error:
                errors.append(error)
                row = _not_written(target, "failed", f"not written: {_in_words(error)}")
            record["artefacts"].append(row | {"measured": dict(record["machine"])})
            _save(source.run, record)
            on_row(row)
    if len(errors) == len(possible):
        raise CheckpointError.from_problems([problem for error in errors for problem in error.problems])
    return record


def check_finite(source: ExportSource) -> None:
    """Raise where a weight is NaN or infinite: no format would hold it, and no consumer could say so.

    Raises:
        NumericsError: one is.
    """
    state = source.model.state_dict()  # type: ignore[attr-defined]
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if bad:
        raise NumericsError(
            "Weights are not finite",
            got=", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else ""),
            need="finite weights",
            try_="an earlier checkpoint; `tilewright report` shows when the loss went bad",
            where=str(source.checkpoint),
        )


def fp32_bytes(source: ExportSource) -> int:
    """Bytes of the weights in FP32, tied ones once."""
    return 4 * sum(param.numel() for param in source.model.parameters())  # type: ignore[attr-defined]


def _not_written(target: Target, state: str, reason: str) -> Row:
    return {"target": target.name, "use": target.use, "consumer": target.consumer.name, "path": None} | {
        "state": state,
        "reason": reason,
    }


def _in_words(error: CheckpointError) -> str:
    return "; ".join(f"{problem.what}: {problem.got}" for problem in error.problems)


def _kept(source: ExportSource, targets: Sequence[Target]) -> list[Row]:
    """Rows of an earlier export of the same checkpoint, of other targets. What they were measured on stays with
    them."""
    before = read_exports(source.run) or {}
    if before.get("checkpoint") != source.checkpoint.name:
        return []
    again = {target.name for target in targets}
    then = {"measured": before.get("machine")}
    return [then | row for row in before["artefacts"] if row.get("target") not in again]


def _clock() -> float | None:
    """MHz of the CPU now, as the kernel reports it; None where it does not."""
    clock = psutil.cpu_freq()
    return round(clock.current) if clock else None


def _proof(source: ExportSource, folder: Path, threads: int, limits: ConsumerLimits) -> Proof:
    torch.set_num_threads(threads)
    vocab_size = vocabulary_size(source)
    question, expected = ask_held_out(source.recipe, source.data, source.tokenizer, source.model, vocab_size)
    return Proof(folder, question, expected, threads, limits)


def vocabulary_size(source: ExportSource) -> int:
    """Rows of the embedding."""
    model = source.model
    return model.config.vocab_size  # type: ignore[attr-defined]


def _baselines(source: ExportSource, proof: Proof, bar: ProgressBar, on_row: Callable[[Row], object]) -> list[Row]:
    weights = proof.folder / "weights.safetensors"
    state, seen = source.model.state_dict(keep_vars=True), set()  # type: ignore[attr-defined]
    once = {name: t.detach() for name, t in state.items() if id(t) not in seen and not seen.add(id(t))}
    save_file(once, weights)
    section = source.recipe.model.model_copy(update={"weights": "random"}).model_dump()
    rows = []
    for name, dtype, compiled in BASELINES:
        bar.phase(f"baseline {name}")
        options = {"section": section, "vocab_size": source.tokenizer.vocab_size, "weights": str(weights)}
        row = {"name": name, **proof.of(_OURS, weights, options | {"dtype": dtype, "compile": compiled})}
        rows.append(row)
        on_row(row)
    weights.unlink()
    return rows


def _one(source: ExportSource, target: Target, path: Path, proof: Proof | None, bar: ProgressBar) -> Row:
    bar.phase(f"{target.name}: write")
    started = time.perf_counter()
    with quiet_converters(show=get_logger(__name__).isEnabledFor(logging.INFO)):
        written = publish(path, lambda partial: target.write(source, partial))
    row: Row = {
        "target": target.name,
        "use": target.use,
        "consumer": target.consumer.name,
        "path": _named_from(source.run.resolve(), path.resolve()),
        "bytes": artefact_bytes(path),
        "hash": artefact_hash(path),
        "write_s": time.perf_counter() - started,
        "notes": list(written.notes),
        "formats": dict(written.quantized),
    }
    return row | _state(target, path, written, proof, bar)


def _named_from(run: Path, path: Path) -> str:
    return str(path.relative_to(run) if path.is_relative_to(run) else path)


def _state(target: Target, path: Path, written: Written, proof: Proof | None, bar: ProgressBar) -> Row:
    consumer = target.consumer
    absent = missing(consumer.packages, consumer.extra)
    if written.lint_only:
        return {"state": "lint only", "reason": written.lint_only}
    if proof is None:
        return {"state": "not proven", "reason": "--no-proof"}
    if absent is not None:
        return {"state": "unavailable", "reason": f"written, not proven: {absent}"}
    bar.phase(f"{target.name}: run in {consumer.name}")
    row = proof.of(consumer.module, path, written.options)
    row["runtime_notes"] = row.pop("notes", [])
    return row


def _save(run: Path, record: Row) -> None:
    try:
        write_exports(run, record)
    except OSError as error:
        raise CheckpointError(
            "exports.json cannot be written",
            got=str(error),
            need="a run folder in which files can be made",
            try_="free space; the artefacts that were listed are whole",
            where=str(run),
        ) from error
