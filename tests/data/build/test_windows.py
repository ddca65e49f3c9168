"""Windows: every token is a target once, whatever text and sizes; and what a model is given at the end."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.corpora import build, prose
from tests.data.build.corpora import settings as build_settings
from tests.draws import examples
from tilewright.data.batches.mixture_order import Picks
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.prepare import prepare
from tilewright.data.stages.text.token_windows import windows


@st.composite
def texts(draw):
    pieces = draw(
        st.lists(st.sampled_from(["ab", "c", ". ", "\n", "\n\n", "def f", "é", "。", "🦊", " "]), max_size=300)
    )
    return [piece.encode() for piece in pieces]


@given(texts(), st.integers(16, 64), st.floats(0, 0.5))
@examples(300)
def test_every_position_is_a_target_of_one_window(pieces, num, overlap):
    data, sizes = b"".join(pieces), [len(piece) for piece in pieces]
    found = windows(data, sizes, num, overlap)
    total = len(pieces) + 2
    targets = [position for span in found for position in range(span.target, span.stop)]
    assert targets == list(range(1, total))
    for before, span in zip([None, *found], found, strict=False):
        assert 0 <= span.start < span.target < span.stop
        assert span.stop - span.start <= num + 1
        assert span.target - span.start <= max(1, int(overlap * num))
        if before is not None:
            assert span.start > before.start
            assert span.stop > before.stop


def test_cuts_are_at_joints():
    """A paragraph end near the end of a window is where it ends; context begins at the start of a line."""
    lines = [f"line {i:02} of text\n" for i in range(60)]
    lines[9] += "\n"
    pieces = [piece.encode() for line in lines for piece in (line[:5], line[5:10], line[10:])]
    found = windows(b"".join(pieces), [len(piece) for piece in pieces], 32, 0.25)
    ends = np.cumsum([0, *map(len, pieces)])
    text = b"".join(pieces)
    assert text[: ends[found[0].stop - 1]].endswith(b"\n\n")
    for span in found[1:]:
        assert text[: ends[span.start - 1]].endswith(b"\n")
        assert text[: ends[span.target - 1]].endswith(b"\n")


def write(folder, num: int, num_words: int):
    folder.mkdir()
    for i in range(num):
        (folder / f"{i}.txt").write_text(prose(i, num_words))
    return folder


@pytest.mark.parametrize("loss", ["context", "train"])
def test_rows_train_every_token_as_often_as_said(tmp_path, loss):
    source = write(tmp_path / "in", 12, 900)
    chunk = {"tokens": 64, "overlap": 0.125, "overlap_loss": loss}
    build(build_settings(source, chunk=chunk), tmp_path / "out")
    data = prepare(str(tmp_path / "out"), seq_len=64, cache_dir=str(tmp_path / "cache"))
    rows = np.arange(data.num_rows["text"])
    batch = data.train_arrays(Picks(rows, np.zeros_like(rows), rows, rows), 0)
    targets = batch["labels"][batch["labels"] != -100]
    tokenizer = load_tokenizer(tmp_path / "out" / "tokens" / "tokenizer")
    table = pq.read_table(tmp_path / "out" / "tokens" / "documents.parquet", filters=[("split", "=", "train")])
    ends = len({row["id"] for row in table.to_pylist()})
    summary = json.loads((tmp_path / "out" / "dataset.json").read_bytes())["summary"]
    wanted = sum(table["tokens"].to_pylist())
    positions = sum(table["length"].to_pylist()) - table.num_rows
    assert summary["tokens"] == wanted + summary["domains"]["text"]["holdout_tokens"]
    assert (targets == tokenizer.eos_id).sum() == ends
    if loss == "context":
        assert len(targets) == wanted + ends
        by_file = {}
        for row in pq.read_table(tmp_path / "out" / "records").to_pylist():
            by_file.setdefault(row["path"], []).append((row["chunk"], row["text"]))
        for path, chunks in by_file.items():
            joined = "".join(text for _, text in sorted(chunks))
            assert joined == (source / path).read_text().strip("\n")
    else:
        assert len(targets) == positions > wanted + ends


def test_held_out_bytes_count_once(tmp_path):
    """Bits per byte divide by the bytes of the text, not by those of the repeated context."""
    source = write(tmp_path / "in", 12, 900)
    build(build_settings(source, chunk={"tokens": 64}, split={"holdout": 0.2}), tmp_path / "out")
    data = prepare(str(tmp_path / "out"), seq_len=64, cache_dir=str(tmp_path / "cache"))
    table = pq.read_table(tmp_path / "out" / "tokens" / "documents.parquet", filters=[("split", "=", "holdout")])
    assert data.eval_bytes("text", 1, 10**6) == sum(table["bytes"].to_pylist())
