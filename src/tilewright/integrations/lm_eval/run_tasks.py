"""Tasks on a model: the harness' `evaluate`, and its numbers as rows."""

from importlib.metadata import version
from typing import Any

from lm_eval.evaluator import evaluate

from tilewright.integrations.lm_eval.model import TilewrightLM
from tilewright.integrations.lm_eval.task_set import TaskSet
from tilewright.training.runlog.task_scores import Conditions, TaskScore


def run_tasks(
    model: TilewrightLM, tasks: TaskSet, *, name: str, role: str, limit: int | None = None, chat: bool = False
) -> list[TaskScore]:
    """Run lm_eval: evaluate a model on tasks.

    Args:
        model: the model.
        tasks: what is evaluated.
        name: of the model, for the rows.
        role: see `TaskScore`.
        limit: documents of each task; None: all.
        chat: apply the model's chat template.

    Returns:
        A row for each metric of each task and group, in the harness' order.
    """
    results: Any = evaluate(
        model, tasks.load(), limit=limit, log_samples=False, apply_chat_template=chat, fewshot_as_multiturn=chat
    )
    rows = []
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        # What a number depends on goes with it: scores are compared only under equal conditions.
        conditions = Conditions(
            harness=f"lm_eval {version('lm_eval')}",
            version=str(results["versions"].get(task, "")),
            num_fewshot=_shots(results["n-shot"].get(task)),
            limit=limit,
            samples=int(metrics.get("sample_len") or results["n-samples"].get(task, {}).get("effective", 0)),
            chat_template=chat,
        )
        better = results["higher_is_better"].get(task) or {}
        for key, value in metrics.items():
            # The harness' keys are "metric,filter"; standard errors have keys of their own, beside those of their
            # metrics.
            metric, comma, filter_ = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_}")
            rows.append(
                TaskScore(
                    role,
                    name,
                    task,
                    metric,
                    filter_,
                    _number(value),
                    _number(stderr),
                    better.get(metric),
                    conditions,
                )
            )
    return rows


def _number(value: Any) -> float | None:
    """A number of an lm_eval run; None where the harness has none ("N/A")."""
    return float(value) if isinstance(value, int | float) else None


def _shots(value: Any) -> int | None:
    return value if isinstance(value, int) else None
