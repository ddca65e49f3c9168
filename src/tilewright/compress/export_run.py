"""The exports of a run: each target written, then run in its consumer; the record grows row by row."""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.publish import artefact_bytes, artefact_hash, publish
from tilewright.compress.export.target import Target, Written, missing
from tilewright.compress.export.targets import why_not
from tilewright.compress.exports_file import Row, read_exports, write_exports
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prove.held_out import ask_held_out, ask_images, reference
from tilewright.compress.prove.proof import Proof
from tilewright.compress.prove.tolerance import TOLERANCES
from tilewright.core.errors import CheckpointError, NumericsError, Problem
from tilewright.core.hardware import cpu_class, cpu_features, detect_machine
from tilewright.core.log import get_logger
from tilewright.data.common.progress import ProgressBar
from tilewright.training.components.export import max_positions

_OURS = "tilewright.compress.prove.torch_model"
BASELINES = (("fp32 eager", "fp32", False), ("bf16 eager", "bf16", False), ("bf16 compiled", "bf16", True))
"""Name, dtype, compiled: of our own model, in a process of its own like every consumer."""
UNROUNDED = "unrounded weights"
"""What an artefact is compared with that holds no integers, of a run that was trained with them."""
_UNROUNDED_NOTE = (
    "holds and is compared with the unrounded weights; the run was trained with integers that this format has not"
)


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
    """Export a run to the targets and prove each; returns the record, which exports.json also holds.

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
    # Targets that cannot be written here are rows, too; if none can be, it is an error.
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
            "cpu_class": cpu_class(cpu_features(environ={})),
            "threads": threads,
            "clock_mhz": _clock(),
            "memory_limit_bytes": None,
            "date": datetime.now(UTC).date().isoformat(),
        },
        "baselines": [],
        "artefacts": _kept(source, targets) + rows,
    }
    # One question for all: the baselines answer it first, then each artefact.
    with _proof_folder() as folder, ProgressBar("export") as bar:
        proof = None
        if prove:
            bar.phase("held-out rows")
            proof = _proof(source, folder, threads, limits or ConsumerLimits.of_this_machine())
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


@contextmanager
def _proof_folder() -> Iterator[Path]:
    """A folder of questions and answers, which goes behind its use."""
    try:
        with tempfile.TemporaryDirectory(prefix="tilewright-proof-") as folder:
            yield Path(folder)
    except (OSError, SafetensorError) as error:  # artefacts have errors of their own
        raise CheckpointError(
            "Artefacts cannot be proven",
            got=str(error),
            need="room for temporary files (FP32 weights, and answers), and memory for a process",
            try_="TMPDIR=FOLDER of another disk, and the same command; artefacts that are listed already are whole",
            where=tempfile.gettempdir(),
        ) from error


def check_proofs(record: Row, targets: Sequence[Target]) -> None:
    """Check an export run: raise where an artefact of these targets failed.

    Args:
        record: of `export_run`.
        targets: that were asked for.

    Raises:
        NumericsError: an artefact is further from the model than its format's limits, or could not be written or run.
    """
    names = {target.name for target in targets}
    failed = [row for row in record["artefacts"] if row["target"] in names and row["state"] == "failed"]
    if failed:
        raise NumericsError.from_problems([_failed(row) for row in failed])


def _failed(row: Row) -> Problem:
    tolerance = TOLERANCES[row["target"]]
    if row.get("kl") is None:
        return Problem(
            f"{row['target']} does not run in {row['consumer']}",
            got=row["reason"],
            need="an answer",
            try_="another --to, or --no-proof to write without running",
            where=row.get("path") or "--to",
        )
    return Problem(
        f"{row['target']} is not the model that it was made of",
        got=row["reason"],
        need=f"KL at most {tolerance.kl:g}, {100 * tolerance.top1:g} % of clear targets alike, all token ids equal",
        try_="another --to or --method; the artefact is kept, do not use it",
        where=row["path"],
    )


def check_finite(source: ExportSource) -> None:
    """Check weights before an export run: raise where one is NaN or infinite: no format would hold it, and no consumer
    could say so.

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
    """Bytes of the exported run's weights in FP32, tied ones once."""
    return 4 * sum(param.numel() for param in source.model.parameters())  # type: ignore[attr-defined]


def _not_written(target: Target, state: str, reason: str) -> Row:
    return {"target": target.name, "use": target.use, "consumer": target.consumer.name, "path": None} | {
        "state": state,
        "reason": reason,
    }


def _in_words(error: CheckpointError) -> str:
    return "; ".join(f"{problem.what}: {problem.got}" for problem in error.problems)


def _kept(source: ExportSource, targets: Sequence[Target]) -> list[Row]:
    """Rows of an earlier export run of the same checkpoint, of other targets. What they were measured on stays with
    them."""
    before = read_exports(source.run) or {}
    if before.get("checkpoint") != source.checkpoint.name:
        return []
    again = {target.name for target in targets}
    then = {"measured": before.get("machine")}
    return [then | row for row in before["artefacts"] if row.get("target") not in again]


def _clock() -> float | None:
    """MHz of the CPU during an export run, as the kernel reports it; None where it does not."""
    clock = psutil.cpu_freq()
    return round(clock.current) if clock else None


def _proof(source: ExportSource, folder: Path, threads: int, limits: ConsumerLimits) -> Proof:
    torch.set_num_threads(threads)
    if source.reads_images:
        asked = ask_images(source.recipe, source.data, source.as_trained)
        return Proof(folder, *asked, threads, limits)
    vocab_size = vocabulary_size(source)
    question, expected, texts = ask_held_out(
        source.recipe, source.data, source.tokenizer, source.as_trained, vocab_size
    )
    rules = source.text_rules
    facts = {"positions": max_positions(source.recipe, source.model), "chat_template": rules.template}
    known = {name: value for name, value in facts.items() if value is not None}
    texts = replace(texts, begin=rules.begin, end=rules.end, facts=known)
    return Proof(folder, question, expected, threads, limits, texts)


def vocabulary_size(source: ExportSource) -> int:
    """The vocabulary size of the exported model: rows of its embedding."""
    model = source.model
    return model.config.vocab_size  # type: ignore[attr-defined]


def _baselines(source: ExportSource, proof: Proof, bar: ProgressBar, on_row: Callable[[Row], object]) -> list[Row]:
    weights = proof.folder / "weights.safetensors"
    state, seen = source.model.state_dict(keep_vars=True), set()  # type: ignore[attr-defined]
    once = {name: t.detach() for name, t in state.items() if id(t) not in seen and not seen.add(id(t))}
    save_file(once, weights)
    section = source.recipe.model.model_copy(update={"weights": "random"}).model_dump()
    rows, plain = [], source.as_trained is not source.model
    log_probs = reference(source.model, proof.question) if plain else None
    for name, dtype, compiled in BASELINES:
        bar.phase(f"baseline {name}")
        words = 0 if source.reads_images else source.tokenizer.vocab_size
        options = {"section": section, "vocab_size": words, "weights": str(weights)}
        more = {"dtype": dtype, "compile": compiled}
        row = {"name": name, **proof.of(_OURS, weights, options | more, log_probs=log_probs)}
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
    return row | _state(source, target, path, written, proof, bar)


def _named_from(run: Path, path: Path) -> str:
    return str(path.relative_to(run) if path.is_relative_to(run) else path)


def _state(
    source: ExportSource, target: Target, path: Path, written: Written, proof: Proof | None, bar: ProgressBar
) -> Row:
    consumer = target.consumer
    absent = missing(consumer.packages, consumer.extra)
    if written.lint_only:
        return {"state": "lint only", "reason": written.lint_only}
    if proof is None:
        return {"state": "not proven", "reason": "--no-proof"}
    if absent is not None:
        return {"state": "unavailable", "reason": f"written, not proven: {absent}"}
    bar.phase(f"{target.name}: run in {consumer.name}")
    plain = source.as_trained is not source.model and not written.trained
    row = proof.of(
        consumer.module,
        path,
        written.options,
        tolerance=TOLERANCES[target.name],
        log_probs=reference(source.model, proof.question) if plain else None,
        stored=reference(written.stored(), proof.question) if written.stored is not None else None,
        differing=written.differing,
    )
    row["runtime_notes"] = [*row.pop("notes", []), *([_UNROUNDED_NOTE] if plain else [])]
    return row | {"compared_with": UNROUNDED if plain else "the model as trained"}


def _save(run: Path, record: Row) -> None:
    try:
        write_exports(run, record)
    except OSError as error:
        raise CheckpointError(
            "exports.json cannot be written",
            got=str(error),
            need="a run folder in which files can be made",
            try_="free disk space and run the same command; artefacts that are listed already are whole",
            where=str(run),
        ) from error


_LOGGERS = ("torch", "torchao", "executorch", "onnxscript", "onnxruntime", "openvino")
"""torch's exporter warns of each absent library that it could translate, torchao of kernels for other machines."""


@contextmanager
def quiet_converters(*, show: bool = False) -> Iterator[None]:
    """Inside, for an export run, libraries that convert models log errors only, and warn of nothing; afterwards all is
    as it was.

    Args:
        show: change nothing.

    Example:
        >>> with quiet_converters():
        ...     logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        False
        >>> logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        True
    """
    if show:
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
