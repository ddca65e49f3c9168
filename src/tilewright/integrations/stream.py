"""The stream of batches in other training loops: plain PyTorch, accelerate, and (`transformers_stream`) the Trainer.

A `Stream` gives whole optimizer steps, and its state is at their ends. Here are its micro-batches one by one, and its
rows, with a state at any of them, for loops that count otherwise or read ahead.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tilewright.core.errors import ConfigError
from tilewright.data.batches.microbatches import count_targets
from tilewright.data.batches.stream import Stream
from tilewright.data.batches.tensors import Batch


class StreamSteps:
    """Steps of a stream, and its state before each of them that is not over yet.

    Args:
        stream: is read from where it is.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._before: dict[int, dict[str, Any]] = {}

    def take(self) -> list[Batch]:
        """Take from a stream the micro-batches of the next step."""
        state = self.stream.state_dict()
        self._before[state["step"]] = state
        return self.stream.next_step()

    def state_before(self, step: int) -> dict[str, Any]:
        """The stream's state before a step, counted from 0; those of earlier steps are forgotten.

        Raises:
            KeyError: of a step that is not at hand: forgotten, or behind the next one.
        """
        for old in [one for one in self._before if one < step]:
            del self._before[old]
        now = self.stream.state_dict()
        return now if now["step"] == step else self._before[step]

    def move(self, weights: Mapping[str, float], why: str) -> int | None:
        """Change the weights of a stream's domains as `Stream.move` does. A state that was kept before a step was read
        ahead changes too."""
        start = self.stream.move(weights, why)
        now = self.stream.state_dict()
        for state in self._before.values() if start is not None else ():
            kept = [stage for stage in state["stages"] if stage[0] < start]
            state |= {"stages": [*kept, now["stages"][-1]], "log": now["log"]}
        return start

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a stream's steps: read on from a state."""
        self._before.clear()
        self.stream.load_state_dict(state)


class StreamLoader:
    """Endless micro-batches of a stream, as a loop iterates over them, with a state at each of them.

    The state is the same on every rank and for any number of ranks where it is taken at the end of a step. accelerate
    saves it with `accelerator.register_for_checkpointing(loader)`.

    Args:
        stream: with this process's rank and the number of ranks.

    See: docs/how-to/other-training-loops.md for whole programs.
    """

    def __init__(self, stream: Stream) -> None:
        self.steps = StreamSteps(stream)
        self.step_ends = True
        """True where the micro-batch that was given last is the last one of its optimizer step."""
        self.step_targets = 0
        """Targets (labels that are not -100) on this rank in the whole step of the micro-batch that was given last. The
        gradient of a step's mean loss is the sum over its micro-batches of that of `loss_sum / step_targets`."""
        self._batches: list[Batch] = []
        self._given = 0

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over a stream's loader from where the last iteration, or a loaded state, has come to."""
        while True:
            if self._given == len(self._batches):
                self._take(given=0)
            self._given += 1
            self.step_ends = self._given == len(self._batches)
            yield self._batches[self._given - 1]

    def move(self, weights: Mapping[str, float], why: str) -> int | None:
        """Change the weights of the domains of a stream's loader, from the next block of samples on; see `Stream.move`.
        Call it on every rank after the same step."""
        return self.steps.move(weights, why)

    def state_dict(self) -> dict[str, Any]:
        """The state of a stream's loader as plain JSON values: the micro-batch that comes next."""
        step = self.steps.stream.state_dict()["step"]
        if self.step_ends:
            return {"stream": self.steps.state_before(step), "given": 0}
        return {"stream": self.steps.state_before(step - 1), "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stream's loader: continue with the micro-batch that would have come next.

        Raises:
            CheckpointError: see `Stream.load_state_dict`.
        """
        self.steps.load(state["stream"])
        self._batches, self._given, self.step_ends = [], 0, True
        if state["given"]:
            self._take(given=state["given"])
            self.step_ends = False

    def _take(self, given: int) -> None:
        """Take the next step's micro-batches from the stream of a loader, of which some were given before."""
        self._batches, self._given = self.steps.take(), given
        self.step_targets = count_targets(self._batches)


class StreamRows(IterableDataset[dict[str, Tensor]]):
    """Endless rows of a stream as arguments of a Hugging Face language model, in the order of its samples.

    A row has `input_ids`, `position_ids`, which restart at each document, `labels` and `shift_labels`, both the next
    tokens: models of transformers take the second as it is. Loaders that batch the rows may read ahead:
    `StreamSteps.state_before` has the state before any step that is not trained yet.

    Args:
        stream: of one rank; the loop's own loader divides its rows among processes.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.steps = StreamSteps(stream)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Rows of a stream from where it is.

        Raises:
            ConfigError: inside of a worker process of a DataLoader, whose state is not known outside.
        """
        if get_worker_info() is not None:
            raise ConfigError(
                "Rows of a stream are read in the process that trains",
                got="a DataLoader with worker processes",
                need="num_workers = 0: the stream makes batches ahead in a thread of its own",
                try_="dataloader_num_workers=0, and Stream(..., prefetch=2)",
            )
        while True:
            for batch in self.steps.take():
                yield from map(language_model_row, *(batch[name] for name in ("input_ids", "positions", "labels")))

    def move(self, weights: Mapping[str, float], why: str) -> int | None:
        """Change the weights of the domains of a stream's rows: see `StreamLoader.move`."""
        return self.steps.move(weights, why)


def language_model_row(ids_S: Tensor, positions_S: Tensor, labels_S: Tensor) -> dict[str, Tensor]:
    """A stream's row as arguments of a causal language model of transformers, [S] or [B, S], from those of a batch of
    ours."""
    return {"input_ids": ids_S, "position_ids": positions_S, "labels": labels_S, "shift_labels": labels_S}
