"""A stream of batches in the Hugging Face Trainer: a callback that keeps its position in the Trainer's checkpoints.

The Trainer reads batches ahead of the step that it trains, and skips trained ones by reading them all again, which is
slow and, where weights of domains have moved, wrong. So the position is the stream's state before the next step, which
is saved with the callback, and nothing is skipped.
"""

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.integrations.stream import StreamRows


class StreamCallback(TrainerCallback, ExportableState):
    """Keeps the position of `StreamRows`, the Trainer's `train_dataset`, in its checkpoints, and continues from there.

    Needs `remove_unused_columns=False`, and to resume `ignore_data_skip=True` and
    `restore_callback_states_from_checkpoint=True`; it raises an error where one of them is missing. Trainer does not
    restore random numbers of dropout under `ignore_data_skip`.

    See: docs/how-to/other-training-loops.md for a whole program.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        """State of the stream in the checkpoint that training continues from."""
        self._rows: StreamRows | None = None
        self._first = self._step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Find the stream's rows when transformers' Trainer begins, and continue from the checkpoint's position.

        Raises:
            ConfigError: the dataset is another one, a setting is missing, or the sizes of steps differ.
            CheckpointError: the checkpoint has no position.
        """
        self._rows = rows = _rows_of(kwargs["train_dataloader"])
        _check(args, rows, resumes=state.global_step > 0)
        if state.global_step and self.saved is None:
            raise CheckpointError(
                "Checkpoint of the Trainer has no position of the stream",
                got=f"step {state.global_step}, saved without StreamCallback",
                need="a checkpoint of a training with this callback",
                try_="Trainer(..., callbacks=[StreamCallback()]) from the first step on",
            )
        if self.saved is not None:
            rows.steps.load(self.saved)
        self._step = state.global_step
        self._first = rows.steps.stream.state_dict()["step"] - state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Count a step of the stream when transformers' Trainer ends it."""
        self._step = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Keep the stream's position of the last checkpoint when transformers' Trainer ends."""
        self._rows = None

    def state(self) -> dict[str, Any]:
        """State of the stream for the Trainer's (transformers) checkpoints: its position."""
        if self._rows is not None:
            self.saved = self._rows.steps.state_before(self._first + self._step)
        return {"args": {}, "attributes": {"saved": self.saved}}


def _rows_of(loader: Any) -> StreamRows:
    """Rows of the stream that a Trainer's (transformers) loader reads; accelerate may have put its own dataset around
    them."""
    dataset = loader.dataset
    while not isinstance(dataset, StreamRows):
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            raise ConfigError(
                "StreamCallback needs rows of a stream",
                got=f"train_dataset of type {type(dataset).__name__}",
                need="StreamRows",
                try_="Trainer(..., train_dataset=StreamRows(stream), callbacks=[StreamCallback()])",
            )
        dataset = inner
    return dataset


def _check(args: TrainingArguments, rows: StreamRows, *, resumes: bool) -> None:
    wanted = {"remove_unused_columns": False}
    if resumes:
        wanted |= {"ignore_data_skip": True, "restore_callback_states_from_checkpoint": True}
    wrong = {name: value for name, value in wanted.items() if getattr(args, name) is not value}
    if wrong:
        settings = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise ConfigError(
            "Settings of the Trainer do not fit a stream",
            got=", ".join(f"{name}={getattr(args, name)}" for name in wrong),
            need=settings,
            try_=f"TrainingArguments(..., {settings})",
        )
    taken = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    size = rows.steps.stream.state_dict()["size"][-1]
    if taken != size:
        raise ConfigError(
            "Steps of the Trainer and of the stream differ in size",
            got=f"{taken} rows per step of the Trainer, {size} of the stream",
            need="the same number: positions are counted in steps",
            try_=f"Stream(..., batch_size={taken})",
        )
