"""Text that is ready to train on: rows in memory-mapped files, a tokenizer, and what went into them.

Made by `prepare`, read by `Stream` (training) and by the evaluation. Everything is a view of two cache entries.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tilewright.core.errors import DataError
from tilewright.core.units import format_share
from tilewright.data.batches.masking import mask_tokens
from tilewright.data.batches.mixture_order import Picks, permute
from tilewright.data.batches.pack_documents import Packing
from tilewright.data.batches.step_samples import padded_length
from tilewright.data.batches.tensors import Batch, as_tensors
from tilewright.data.batches.token_rows import IGNORE, SPLITS, STARTS, TOKEN_BYTES, TextRows, laid_out, starts_of
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer
from tilewright.parallel.pipeline.assignment import part_bounds

_POSITIONS_PER_CALL = 1 << 14
_EVAL_SEED = 0x0E7A1  # masks of evaluation batches, whatever the run's seed


class PreparedData:
    """Prepared text.

    `fingerprint` names the content: equal fingerprints mean equal rows, on any machine. `domains` are in the order of
    the mixture, `eval_domains` those that have held-out rows; `num_rows` gives each domain's training rows. With `rows`
    "documents" each row is one document, and `lengths` and `joined` are for them. `summary` is plain JSON: docs, bytes,
    tokens, duplicates, what was read and refused by reason (`Account.summary`), rows and utilisation, by domain too.
    """

    def __init__(self, corpus: Path, packed: Path):
        meta = json.loads((packed / "meta.json").read_bytes())
        self.folder = packed
        self.fingerprint: str = meta["fingerprint"]
        self.summary: dict[str, Any] = meta["summary"]
        self.task: str = meta["task"]
        self.rows: str = meta.get("rows_of", "packed")
        self.seq_len: int = meta["seq_len"]
        self.tokenizer: Tokenizer = load_tokenizer(corpus / "tokenizer")
        self._corpus = corpus
        self._ranges: dict[str, dict[str, list[int]]] = meta["rows"]  # split -> domain -> [first row, last row + 1]
        self._rows = {split: self._open(split) for split in SPLITS}
        self.domains: tuple[str, ...] = tuple(self._ranges["train"])
        self.eval_domains: tuple[str, ...] = tuple(d for d, (a, b) in self._ranges["holdout"].items() if b > a)
        self.num_rows: Mapping[str, int] = {d: b - a for d, (a, b) in self._ranges["train"].items()}
        self._first_row = np.array([a for a, _ in self._ranges["train"].values()], np.int64)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer's files of prepared text."""
        return self._corpus / "tokenizer"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end what a model of this prepared text writes."""
        return self.tokenizer.stop_ids

    @property
    def vocab_size(self) -> int:
        """Ids that a model of prepared text tells apart."""
        return self.tokenizer.vocab_size

    def _open(self, split: str) -> TextRows:
        def column(folder: Path, name: str) -> np.ndarray:
            return np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))

        packing = Packing(*(column(self.folder, f"{split}.{part}.npy") for part in ("starts", "lengths", "first")))
        masked = (self._corpus / f"{split}.trained.npy").exists()
        trained = column(self._corpus, f"{split}.trained.npy") if masked else None
        return TextRows(column(self._corpus, f"{split}.npy"), packing, self.seq_len, self.task == "causal_lm", trained)

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Batch arrays [B, seq_len] of training rows of prepared text, see `TextRows.gather`; masked for masked_lm."""
        batch = self._rows["train"].gather(self._first_row[picks.domain] + picks.row)
        return self._masked(batch, seed, picks.sample) if self.task == "masked_lm" else batch

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding of prepared text."""
        zeros = np.zeros((1, self.seq_len), np.int64)
        return {
            "input_ids": zeros,
            "labels": zeros + IGNORE,
            "positions": zeros,
            "segments": np.full((1, self.seq_len), -1, np.int32),
        }

    @cached_property
    def num_tokens(self) -> Mapping[str, int]:
        """Tokens of each domain's training rows of prepared text."""
        ends = np.append(0, np.cumsum(self._rows["train"].packing.lengths_P, dtype=np.int64))
        first_R = self._rows["train"].packing.first_R
        return {name: int(ends[first_R[b]] - ends[first_R[a]]) for name, (a, b) in self._ranges["train"].items()}

    @property
    def rows_per_call(self) -> int:
        """Rows of prepared text that are asked for at once: see `GatheredRows`."""
        return _POSITIONS_PER_CALL // self.seq_len

    @property
    def full_rows(self) -> int:
        """Training rows of prepared text; of documents so many as their tokens would fill."""
        if self.rows == "documents":
            return -(-sum(self.num_tokens.values()) // self.seq_len)
        return sum(self.num_rows.values())

    @cached_property
    def attention_share(self) -> float:
        """The share of position pairs of full rows that are within documents: the sum of L^2 over that of L times
        `seq_len`, for prepared text in rows of documents; 1 where rows are packed."""
        if self.rows != "documents":
            return 1.0
        lengths = self._rows["train"].packing.lengths_P.astype(np.float64)
        return float((lengths * lengths).sum() / max(1.0, lengths.sum() * self.seq_len))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes of a plan on the lengths of prepared text's documents; none where rows are packed."""
        if self.rows != "documents":
            return ()
        lengths = self._rows["train"].packing.lengths_P.astype(np.float64)
        share = format_share(self.attention_share)
        mean = lengths.sum() / max(1, len(lengths))
        return (
            f"documents of this data have {mean:.0f} tokens in the mean; their attention takes {share} of full rows'",
        )

    def lengths(self, picks: Picks) -> np.ndarray:
        """Tokens of training documents of prepared text, int64 [N]."""
        return self._rows["train"].lengths(self._first_row[picks.domain] + picks.row)

    def joined(self, picks: Picks, seed: int, length: int) -> dict[str, np.ndarray]:
        """Batch arrays [1, length] of training documents of prepared text behind each other, see `TextRows.join`;
        masked for masked_lm. Of none padding alone."""
        return self._joined("train", self._first_row[picks.domain] + picks.row, length, seed, picks.sample)

    def _joined(
        self, split: str, rows_N: np.ndarray, length: int, seed: int, samples_N: np.ndarray
    ) -> dict[str, np.ndarray]:
        rows = self._rows[split]
        batch = rows.join(rows_N, length)
        if self.task == "masked_lm" and len(rows_N):  # masks go by sample and position: each document is a row for them
            used_N = rows.lengths(rows_N)
            longest = int(used_N.max())
            here, at = np.arange(longest) < used_N[:, None], slice(0, int(used_N.sum()))
            names = ("input_ids", "labels")
            apart = {name: laid_out(name, batch[name][0, at], used_N, longest) for name in names}
            masked = self._masked(apart, seed, samples_N)
            for name in names:
                batch[name][0, at] = masked[name][here]
        return batch | {STARTS: starts_of(rows.lengths(rows_N), length)}

    def eval_batches(self, domain: str, micro_batch_size: int, num: int) -> list[Batch]:
        """Return at most `num` batches of at most `micro_batch_size` held-out rows of one domain of prepared text, the
        same on every call. Of whole documents, a batch has as many as fit into `micro_batch_size * seq_len` tokens."""
        if self.rows == "documents":
            parts, most = self._eval_documents(domain, micro_batch_size, num), micro_batch_size * self.seq_len
            lengths = [padded_length(int(self._rows["holdout"].lengths(part).sum()), most) for part in parts]
            pairs = zip(parts, lengths, strict=True)
            return [as_tensors(self._joined("holdout", part, length, _EVAL_SEED, part)) for part, length in pairs]
        chosen = self._eval_rows(domain, micro_batch_size * num)
        batches = []
        for start in range(0, len(chosen), micro_batch_size):
            rows = chosen[start : start + micro_batch_size]
            batch = self._rows["holdout"].gather(rows)
            if self.task == "masked_lm":
                batch = self._masked(batch, _EVAL_SEED, rows)
            batches.append(as_tensors(batch))
        return batches

    def eval_bytes(self, domain: str, micro_batch_size: int, num: int) -> int | None:
        """UTF-8 bytes of prepared text that the targets of `eval_batches` stand for; None where targets are masked
        tokens."""
        if self.task == "masked_lm":
            return None
        if self.rows == "documents":
            parts = self._eval_documents(domain, micro_batch_size, num)
            return sum(self._rows["holdout"].num_target_bytes(part, self._sizes) for part in parts)
        return self._rows["holdout"].num_target_bytes(self._eval_rows(domain, micro_batch_size * num), self._sizes)

    def _eval_documents(self, domain: str, micro_batch_size: int, num: int) -> list[np.ndarray]:
        """Held-out documents of one domain of prepared text in at most `num` batches, the first ones of what more
        batches would be."""
        first, stop = self._ranges["holdout"][domain]
        rows_N = self._eval_rows(domain, stop - first)
        ends_N = np.cumsum(self._rows["holdout"].lengths(rows_N))
        bounds = part_bounds(ends_N, micro_batch_size * self.seq_len)[: num + 1]
        return [rows_N[a:b] for a, b in pairwise(bounds)]

    def compressors(self, domain: str) -> dict[str, float]:
        """Bits per byte that general compressors need for the held-out prepared text of a domain, see
        `dataset.compressors`."""
        return self.summary["domains"][domain].get("compressors", {})

    def _eval_rows(self, domain: str, num: int) -> np.ndarray:
        """Choose at most `num` held-out rows of one domain of prepared text, the same on every call."""
        first, stop = self._ranges["holdout"][domain]
        size = stop - first
        take = min(num, size)
        return first + permute(np.arange(take), np.full(take, size), np.full(take, 0, np.uint64))

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.load(self._corpus / TOKEN_BYTES, mmap_mode="r", allow_pickle=False)

    def _masked(self, batch: dict[str, np.ndarray], seed: int, samples: np.ndarray) -> dict[str, np.ndarray]:
        tokenizer = self.tokenizer
        assert tokenizer.mask_id is not None, "`need_mask` has looked"
        return mask_tokens(
            batch,
            seed=seed,
            samples_B=samples,
            mask_id=tokenizer.mask_id,
            special_ids=tokenizer.special_ids,
            vocab_size=tokenizer.vocab_size,
        )

    def held_out_documents(self) -> Iterator[np.ndarray]:
        """Token ids of each held-out document of prepared text, without begin and end."""
        table = pq.read_table(self._corpus / "documents.parquet", filters=[("split", "=", "holdout")])
        tokens = self._rows["holdout"].tokens
        end = 0
        for length in table["length"].to_pylist():
            start, end = end, end + length
            yield np.asarray(tokens[start + 1 : end - 1], np.int64)

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        """The documents of a training row of prepared text: name, first position of the piece in the document,
        positions in it, text."""
        found = []
        for start, length in self._rows["train"].pieces(self._ranges["train"][domain][0] + row):
            document = int(np.searchsorted(self._starts, start, side="right")) - 1
            name = self._names[document]
            text = self.tokenizer.decode(self._rows["train"].tokens[start : start + length].tolist())
            where = {"start": start - int(self._starts[document]), "length": length}
            found.append({"name": name, **where, "text": text, **self._place(document)})
        return found

    def _place(self, document: int) -> dict[str, Any]:
        """Place of a prepared text's document: record, file and bytes of one of a built dataset; nothing of other text,
        which has names alone."""
        table = self._documents
        names = [name for name in ("id", "path", "part", "start", "stop") if name in table.column_names]
        return {f"file_{name}" if name in ("start", "stop") else name: table[name][document].as_py() for name in names}

    @cached_property
    def _documents(self) -> Any:
        return pq.read_table(self._corpus / "documents.parquet", filters=[("split", "=", "train")])

    @cached_property
    def _names(self) -> list[str]:
        return self._documents["name"].to_pylist()

    @cached_property
    def _starts(self) -> np.ndarray:
        lengths = self._documents["length"].to_numpy()
        return np.cumsum(lengths) - lengths

    def rejects(self) -> list[dict[str, Any]]:
        """Rejects of prepared text: everything that was set aside: where, reason, count, example."""
        lines = (self._corpus / "rejects.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]


def need_mask(tokenizer: Tokenizer) -> None:
    """Raises DataError where masked_lm is asked of prepared text whose tokenizer has no mask token."""
    if tokenizer.mask_id is None:
        raise DataError(
            "Tokenizer without a mask token for masked_lm",
            where="data.tokenizer",
            got="a tokenizer without one",
            need='a "mask_token" in tokenizer_config.json, or a token named [MASK] or <mask>',
            try_='data.tokenizer = ""   (train one on the data; it has a mask token)',
        )
