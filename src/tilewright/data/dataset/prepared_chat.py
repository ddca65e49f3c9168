"""Conversations that are ready to train on: rows whose labels are the assistant's tokens alone.

The batch arrays are those of text; of preferences each has one dimension more, for the chosen and the rejected answer.
B rows, S positions.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tilewright.data.batches.mixture_order import Picks
from tilewright.data.batches.pack_documents import Packing
from tilewright.data.batches.tensors import Batch, as_tensors
from tilewright.data.batches.token_rows import TextRows
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.dataset.prepared_text import PreparedData

_MOST_NAMED = 8  # fields that are not read


class PreparedChat(PreparedData):
    """Prepared conversations. `template` renders more of them; `pairs` where they are preferences."""

    def __init__(self, corpus: Path, packed: Path, pairs: bool):
        self.pairs = pairs
        self._reference: np.ndarray | None = None
        self._beta = 0.0
        super().__init__(corpus, packed)
        self.template = ChatTemplate.load(str(corpus / "tokenizer"), self.tokenizer)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer in prepared chat data."""
        return self.template.stops.ids

    def _open(self, split: str) -> TextRows:
        rows = super()._open(split)
        trained = np.load(self._corpus / f"{split}.trained.npy", mmap_mode="r", allow_pickle=False)
        return TextRows(rows.tokens, rows.packing, self.seq_len, True, trained)

    def _gather(self, split: str, rows_B: np.ndarray) -> dict[str, np.ndarray]:
        rows = self._rows[split]
        if not self.pairs:
            return rows.gather(rows_B)
        pieces = rows.packing  # a pair's two pieces, each as a row of its own
        alone = Packing(pieces.starts_P, pieces.lengths_P, np.arange(len(pieces.starts_P) + 1))
        both = (pieces.first_R[rows_B][:, None] + np.arange(2)).reshape(-1)
        batch = TextRows(rows.tokens, alone, self.seq_len, True, rows.trained).gather(both)
        shaped = {name: values.reshape(len(rows_B), 2, self.seq_len) for name, values in batch.items()}
        return self._with_reference(shaped, rows_B + self._rows["train"].packing.num_rows * (split == "holdout"))

    def _with_reference(self, batch: dict[str, np.ndarray], rows_B: np.ndarray) -> dict[str, np.ndarray]:
        batch = batch | {"rows": rows_B}
        if self._reference is None:
            return batch
        beta_B = np.full(len(rows_B), self._beta, np.float32)
        return batch | {"reference": self._reference[rows_B], "beta": beta_B}

    @property
    def num_pairs(self) -> int:
        """Pairs of prepared chat data in both splits."""
        return sum(rows.packing.num_rows for rows in self._rows.values())

    def all_pairs(self) -> Iterator[Batch]:
        """Every pair of prepared chat data as a batch of one, in the order of `rows`: training, then held out."""
        for split, rows in self._rows.items():
            for row in range(rows.packing.num_rows):
                batch = self._gather(split, np.array([row]))
                yield as_tensors(batch)

    def set_reference(self, logps: np.ndarray, beta: float) -> None:
        """Set the reference of prepared chat data: let batches of pairs carry what their loss needs from now on; see
        `models.base.preference`.

        Args:
            logps: FP32 [pairs, 2], in the order of `all_pairs`.
            beta: of the loss.
        """
        self._reference, self._beta = logps, beta

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Batch arrays [B, S] of training rows of prepared chat data; of preferences [B, 2, S], with `rows` [B], the
        place of each pair."""
        return self._gather("train", self._first_row[picks.domain] + picks.row)

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding of prepared chat data."""
        blank = super().blank_row()
        if not self.pairs:
            return blank
        return self._with_reference({name: np.repeat(v[:, None], 2, 1) for name, v in blank.items()}, np.array([-1]))

    def eval_batches(self, domain: str, micro_batch_size: int, num: int) -> list[Batch]:
        """Return at most `num` batches of at most `micro_batch_size` held-out rows of one domain of prepared chat data,
        the same on every call."""
        if self.rows == "documents" and not self.pairs:
            return super().eval_batches(domain, micro_batch_size, num)
        chosen = self._eval_rows(domain, micro_batch_size * num)
        parts = [chosen[at : at + micro_batch_size] for at in range(0, len(chosen), micro_batch_size)]
        batches = [self._gather("holdout", rows) for rows in parts]
        return [as_tensors(batch) for batch in batches]

    def eval_bytes(self, domain: str, micro_batch_size: int, num: int) -> int | None:
        """Bytes of text of prepared chat data in evaluation batches: None, since answers end in tokens that stand for
        no text."""
        return None

    def preview(self) -> list[str]:
        """Preview of prepared chat data: lines that show what is trained: the shapes, the longest rows, an example with
        its trained spans in marks."""
        facts = self.summary["chat"]
        # Shapes are counted per domain; here their sum.
        shapes: dict[str, int] = {}
        for found in facts["shapes"].values():
            for shape, count in found.items():
                shapes[shape] = shapes.get(shape, 0) + count
        counted = ", ".join(f"{shape} ({count:,})" for shape, count in shapes.items())
        longest = ", ".join(f"{row['length']:,}" for row in facts["longest"])
        lines = [
            f"rows recognised as {counted}; template of {facts['template']}",
            f"longest: {longest} tokens; {facts['truncated']:,} cut at data.seq_len = {facts['seq_len']}, "
            f"{facts['truncated_tokens']:,} tokens lost",
        ]
        # Lines for what a user may want to mend: what is lost, repeated, shared or not read.
        for reason, numbers in facts["lost"].items():
            rows = f"{numbers['rows']:,} of the renderings of {numbers['documents']:,} conversations"
            lines.append(f"{rows} are not trained ({reason}); of {numbers['refused']:,} of them nothing is left")
        if facts["rendered_again"]:
            lines.append(
                f"{facts['rendered_again']:,} answers are rows of their own: the template rewrites earlier turns"
            )
        if facts["saved_tokens"]:
            lines.append(f"answers of one conversation share its tokens: {facts['saved_tokens']:,} are not repeated")
        if facts["not_read"]:
            names = [f"{name} ({count:,})" for name, count in facts["not_read"].items()]
            others = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            lines.append(f"not read, by number of rows: {', '.join(names[:_MOST_NAMED])}{others}")
        return [*lines, "what is trained stands between [[ and ]]:", *self._example().split("\n")]

    def _example(self) -> str:
        example = self.summary["chat"]["example"]
        text, at = "", 0
        for begin, end in example["spans"]:
            text += f"{example['text'][at:begin]}[[{example['text'][begin:end]}]]"
            at = end
        return text + example["text"][at:]
