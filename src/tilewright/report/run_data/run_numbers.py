"""Numbers of a run, read from its folder: losses, norms, times and peaks that rules, figures and tiles share.

Plain functions over `RunData`, without words and without HTML. A number that is not recorded is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tilewright.core.units import bits_per_byte
from tilewright.data.dataset.compressors import pooled_bits
from tilewright.report.run_data.clean_rows import Row, number, number_tables
from tilewright.report.run_data.collect_run import RunData

TRAINING = ("forward", "backward", "update")
"""Phases of a training step that the memory tracker measures."""
FEWEST_SETTLED = 8
"""Norms after the warm-up below which all norms of the run are looked at instead."""


@dataclass(frozen=True)
class LossSpan:
    """Training loss in nats per token: the first one recorded, and the mean over the last `count` records.

    `end` is None where the loss of the last record was not finite.
    """

    start: float
    end: float | None
    count: int


def loss_span(run: RunData) -> LossSpan | None:
    """Measure where the training loss began and ended; the end is a mean over the last twentieth of the records."""
    _, losses = run.column("loss")
    if not losses:
        return None
    count = max(1, len(losses) // 20)
    last = next((row for row in reversed(run.steps) if "loss" in row), {})
    ended = number(last.get("loss")) is not None
    return LossSpan(losses[0], fmean(losses[-count:]) if ended else None, count)


def not_finite(run: RunData, name: str) -> int:
    """Recorded rows of a run's numbers in which a metric was not finite."""
    return sum(1 for row in run.steps if name in row and row[name] is None)


def held_out(row: Row, table: str = "eval") -> float | None:
    """The held-out loss of a run in nats per token over all domains of an evaluation, weighted by tokens; None if one
    is not finite. Tables are those of `clean_rows.eval_row`: `eval` makes curves, `eval_all` numbers."""
    results = list(row[table].values())
    if not results or any(result["loss"] is None for result in results):
        return None
    tokens = sum(result["tokens"] for result in results)
    return sum(result["loss"] * (result["tokens"] / tokens) for result in results)


def held_out_losses(run: RunData, table: str = "eval") -> list[tuple[float, float]]:
    """Steps and pooled held-out losses of the evaluations whose loss was finite."""
    return [(float(row["step"]), loss) for row in run.evals if (loss := held_out(row, table)) is not None]


def part_note(run: RunData) -> str:
    """A note on a run's numbers that curves are of a part of the held-out text; "" where evaluations on the way take
    all of it."""
    for row in run.evals:
        part, of_all = (sum(result["tokens"] for result in row[table].values()) for table in ("eval", "eval_all"))
        if part != of_all:
            return (
                f"The curve is of {part:,.0f} of the {of_all:,.0f} held-out tokens, which evaluations on the way take "
                "(train.eval_part_batches). The last one takes all of them; a number beside a name is the newest one's."
            )
    return ""


def domain_losses(run: RunData, table: str = "eval") -> dict[str, list[tuple[float, float]]]:
    """Steps and finite held-out losses of each domain, in alphabetical order; `eval_other`: of text that is not trained
    on."""
    domains = sorted({domain for row in run.evals for domain in row[table]})
    return {domain: _of_domain(run, table, domain) for domain in domains}


def _of_domain(run: RunData, table: str, domain: str) -> list[tuple[float, float]]:
    found = [(float(row["step"]), row[table][domain]["loss"]) for row in run.evals if domain in row[table]]
    return [(step, loss) for step, loss in found if loss is not None]


def held_out_bits(run: RunData, table: str = "eval") -> list[tuple[float, float]]:
    """Steps and held-out bits per byte over all domains, of the evaluations that have finite losses and bytes of
    text."""
    found = []
    for row in run.evals:
        loss, results = held_out(row, table), row[table].values()
        if loss is not None and all(result["bytes"] for result in results):
            tokens, size = (sum(result[name] for result in results) for name in ("tokens", "bytes"))
            found.append((float(row["step"]), bits_per_byte(loss * tokens, size)))
    return found


def domain_bits(run: RunData, table: str = "eval") -> dict[str, list[tuple[float, float]]]:
    """Steps and bits per byte of each domain with bytes of text, in alphabetical order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in run.evals:
        for domain, result in sorted(row[table].items()):
            if result["loss"] is not None and result["bytes"]:
                bits = bits_per_byte(result["loss"] * result["tokens"], result["bytes"])
                found.setdefault(domain, []).append((float(row["step"]), bits))
    return dict(sorted(found.items()))


def compressor_lines(run: RunData) -> dict[str, float]:
    """The bits per byte that general compressors need for a run's held-out text, over the domains of the last
    evaluation."""
    if not run.evals:
        return {}
    domains = (run.data or {}).get("domains")
    found = number_tables({name: row.get("compressors") for name, row in _tables(domains)})
    return pooled_bits(found, {name: result["bytes"] or 0 for name, result in run.evals[-1]["eval_all"].items()})


def _tables(value: object) -> list[tuple[str, Mapping]]:
    return (
        [(name, row) for name, row in value.items() if isinstance(row, Mapping)] if isinstance(value, Mapping) else []
    )


def settled_norms(run: RunData) -> tuple[list[float], str]:
    """The positive gradient norms of a run's steps after the warm-up (of all steps if that leaves fewer than
    `FEWEST_SETTLED`), and which steps these are, in words."""
    warmup = run.number_setting("optim", "warmup_steps") or 0
    pairs = [(step, norm) for step, norm in zip(*run.column("grad_norm"), strict=True) if norm > 0]
    late = [norm for step, norm in pairs if step > warmup]
    if warmup and len(late) >= FEWEST_SETTLED:
        return late, "recorded steps after warm-up"
    return [norm for _, norm in pairs], "recorded steps"


def total_tokens(run: RunData) -> float | None:
    """Number of tokens that a run was trained on; the rows count from the start of the run."""
    _, tokens = run.column("tokens")
    return tokens[-1] if tokens else None


def total_seconds(run: RunData) -> float | None:
    """Number of seconds of a run from start to the last row, time between a stop and a resume left out."""
    times = [number(row.get("time_s")) for row in (*run.steps[-1:], *run.evals[-1:])]
    return max((time for time in times if time is not None), default=None)


def state(run: RunData) -> str:
    """Tell from the events if a run finished, stopped early, or did not finish."""
    last = last_process_event(run)
    return {"done": "finished", "stop": "stopped early"}.get(str(last.get("kind")), "not finished")


def last_process_event(run: RunData) -> Row:
    """The newest event about a run's process: a start, a resume, a stop, or the end. Empty without one."""
    return next(reversed(run.kinds("done", "stop", "start", "resume")), {})


def skipped_steps(run: RunData) -> int:
    """Number of a run's skipped steps, whose update was not applied; a step that a resumed run repeats counts once."""
    return sum(row.get("skipped") is not None for row in run.steps)


def peak_memory_row(run: RunData, with_owners: bool = False) -> Row | None:
    """The row of a run's numbers with the largest peak of memory, of those that split it by owner if asked; None where
    there is none."""
    rows = [row for row in run.steps if "memory_bytes" in row and ("memory" in row or not with_owners)]
    return max(rows, key=lambda row: row["memory_bytes"], default=None)


def phase_of(row: Row) -> str:
    """The phase of a row of a run's numbers that its bytes by owner are of; empty where phases are not recorded."""
    owners, phases = row.get("memory"), row.get("memory_phases") or {}
    return next((name for name, found in phases.items() if found == owners), "")


def training_peak(run: RunData) -> float | None:
    """Number of bytes at the highest peak of a run's training step; the peak of all that was done where phases are not
    recorded."""
    peaks: list[float] = []
    for row in run.steps:
        if "memory_bytes" in row:
            phases = row.get("memory_phases") or {}
            of_step = [sum(phases[name].values()) for name in TRAINING if name in phases]
            peaks.append(max(of_step, default=row["memory_bytes"]))
    return max(peaks, default=None)


def planned_peak(run: RunData) -> tuple[str, Mapping[str, float]]:
    """The phase of a training step with most planned bytes, and its bytes by owner, with a checkpoint being written if
    that was done; empty without a plan."""
    plan = run.plan or {}
    phases = plan.get("phases") or {}
    names = [plan.get("step_phase") or plan.get("peak_phase") or ""]
    if any(event.get("background") for event in run.kinds("save")):
        names.append("checkpoint")
    found = {name: phases.get(name) or {} for name in names}
    phase = max(found, key=lambda name: sum(found[name].values()))
    return phase if found[phase] else "", found[phase]


def quarters(values: Sequence[float]) -> list[Sequence[float]]:
    """Divide a run's numbers into four stretches of as equal a length as can be, in order.

    Example:
        >>> quarters([1, 2, 3, 4, 5, 6])
        [[1], [2, 3], [4], [5, 6]]
    """
    count = len(values)
    return [values[count * i // 4 : count * (i + 1) // 4] for i in range(4)]
