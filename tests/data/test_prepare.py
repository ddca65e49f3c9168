"""`prepare` from end to end: two runs agree, what is trained is what was in the files, damage is repaired."""

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.conftest import write_text
from tests.ranks import fork_server
from tilewright.core.errors import DataError
from tilewright.data.batches.mixture_order import Picks
from tilewright.data.batches.stream import Stream
from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.common.tokenizer import train_tokenizer
from tilewright.data.dataset.compressors import COMPRESSORS, compressor_bits
from tilewright.data.prepare import prepare

OPTIONS = {"seq_len": 48, "vocab_size": 350, "holdout": 0.1}


def all_rows(prepared, split="train"):
    rows = prepared._rows[split]
    return rows.gather(np.arange(rows.packing.num_rows))


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_document_is_trained_or_held_out_once(corpus_folder, prepared):
    """Targets of all rows, read as text, are exactly the files; end tokens are as many as documents."""
    tokenizer, num_documents, tokens = prepared.tokenizer, 0, []
    for split in ("train", "holdout"):
        labels = all_rows(prepared, split)["labels"]
        flat = labels[labels != IGNORE]
        num_documents += int((flat == tokenizer.eos_id).sum())
        tokens.append(np.sort(flat[flat != tokenizer.eos_id]))
    files = [p.read_text().strip("\n") for p in corpus_folder.rglob("*.txt")]
    expected = np.sort(list(itertools.chain.from_iterable(tokenizer.encode_batch(files))))
    assert num_documents == len(files) == prepared.summary["docs"]
    assert (np.sort(np.concatenate(tokens)) == expected).all()
    assert prepared.summary["tokens"] == len(expected)
    assert prepared.summary["bytes"] == sum(len(f.encode()) for f in files)


def test_summary_adds_up(prepared):
    summary = prepared.summary
    assert json.loads(json.dumps(summary)) == summary
    assert list(summary["domains"]) == list(prepared.domains) == ["a", "b", "c"]
    for key, total in (("docs", 80), ("bytes", summary["bytes"]), ("tokens", summary["tokens"])):
        assert sum(domain[key] for domain in summary["domains"].values()) == total
    assert {d: counts["rows"] for d, counts in summary["domains"].items()} == prepared.num_rows
    assert summary["utilisation"] > 0.97
    assert summary["vocab_size"] == prepared.vocab_size == prepared.tokenizer.vocab_size


def test_two_runs_write_the_same_bytes(corpus_folder, tmp_path):
    """In another process, with one thread and another hash seed, into another cache."""
    one = prepare(str(corpus_folder), cache_dir=str(tmp_path / "one"), **OPTIONS)
    arguments = f"{str(corpus_folder)!r}, cache_dir={str(tmp_path / 'two')!r}, **{OPTIONS}"
    code = f"from tilewright.data.prepare import prepare; prepare({arguments})"
    env = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    first, second = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert len(one.fingerprint) == 32


def test_the_fingerprint_names_the_content(corpus_folder, tmp_path):
    """The same for the same text elsewhere; another for another row length, task or text."""

    def fingerprint(folder, **options):
        return prepare(str(folder), cache_dir=str(tmp_path / "cache"), **(OPTIONS | options)).fingerprint

    copy = tmp_path / "copy"
    for path in corpus_folder.rglob("*.txt"):
        target = copy / path.relative_to(corpus_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    base = fingerprint(corpus_folder)
    assert fingerprint(copy) == base
    (copy / "a" / "doc000.txt").write_text("changed")
    others = {fingerprint(copy), fingerprint(corpus_folder, seq_len=40), fingerprint(corpus_folder, task="masked_lm")}
    assert len(others | {base}) == 4


def count_builds(monkeypatch):
    from tilewright.data import prepare as module

    built, original = [], module.build_corpus

    def counted(folder, *args, **kwargs):
        built.append(folder)
        original(folder, *args, **kwargs)

    monkeypatch.setattr(module, "build_corpus", counted)
    return built


def test_the_cache_is_used_and_kept_apart(corpus_folder, tmp_path, monkeypatch):
    built = count_builds(monkeypatch)
    for options, builds in (({}, 1), ({}, 1), ({"seq_len": 32}, 1), ({"vocab_size": 320}, 2), ({"domains": ("a",)}, 3)):
        prepare(str(corpus_folder), cache_dir=str(tmp_path), **(OPTIONS | options))
        assert len(built) == builds, options


@pytest.mark.parametrize("damage", ["shorten", "change", "delete", "manifest"])
@pytest.mark.parametrize("kind", ["text", "rows"])
def test_a_torn_entry_is_made_again(corpus_folder, tmp_path, caplog, damage, kind):
    before = prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS)
    whole = files_of(tmp_path / "data")
    entry = next((tmp_path / "data").glob(f"{kind}-*/"))
    file = entry / ("manifest.json" if damage == "manifest" else "train.npy" if kind == "text" else "train.first.npy")
    data = file.read_bytes()
    if damage == "delete":
        file.unlink()
    elif damage == "change":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        file.write_bytes(data[: len(data) // 2])
    del before
    with caplog.at_level(logging.WARNING, "tilewright"):
        prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS)
    assert "damaged" in caplog.text
    assert files_of(tmp_path / "data") == whole


def test_a_whole_entry_needs_no_lock(corpus_folder, tmp_path, monkeypatch):
    """So that a read-only cache can be shared."""
    prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tilewright.data.common.cache_entries._locked", refuse)
    assert prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS).summary["docs"] == 80


def test_a_killed_preparation_leaves_nothing_that_hurts(corpus_folder, tmp_path):
    prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS)
    entry = next((tmp_path / "data").glob("text-*/"))
    part = entry.with_name(entry.name + ".part-99999")
    entry.rename(part)  # as a process leaves it that dies before the rename
    (part / "manifest.json").unlink()
    again = prepare(str(corpus_folder), cache_dir=str(tmp_path), **OPTIONS)
    assert again.summary["docs"] == 80
    assert not part.exists()


def test_a_process_of_its_own_makes_the_same(corpus_folder, tmp_path):
    here = prepare(str(corpus_folder), cache_dir=str(tmp_path / "here"), **OPTIONS)
    code = f"""
from tilewright.data.dataset.compressors import COMPRESSORS, compressor_bits
from tilewright.data.prepare import prepare
made = prepare({str(corpus_folder)!r}, cache_dir={str(tmp_path / "apart")!r}, own_process=True, **{OPTIONS!r})
print(made.fingerprint, sorted(made.summary["seconds"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{here.fingerprint} {sorted(here.summary['seconds'])}"
    assert files_of(tmp_path / "apart") == files_of(tmp_path / "here")


def test_what_a_process_of_its_own_raises_is_told_as_ever(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("x")
    told = []
    for own_process in (False, True):
        with pytest.raises(DataError) as caught:
            prepare(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), own_process=own_process)
        told.append(caught.value.problems)
    assert told[0] == told[1]
    assert not list((tmp_path / "cache" / "data").glob("*/"))


def _prepare_in_process(source, cache, queue):
    prepared = prepare(source, cache_dir=cache, **OPTIONS)
    queue.put((prepared.fingerprint, list(prepared.summary["seconds"])))


def test_processes_at_once_prepare_once(corpus_folder, tmp_path):
    context = fork_server()
    queue = context.Queue()
    arguments = (str(corpus_folder), str(tmp_path), queue)
    processes = [context.Process(target=_prepare_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=100) for _ in processes]
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert sum("encoding" in phases for _, phases in results) == 1


def test_provenance_points_at_the_text(corpus_folder, prepared):
    """Each piece of a batch, decoded, is in the file that `explain` names."""
    stream = Stream(prepared, seed=3, batch_size=8, micro_batch_size=8, prefetch=0)
    batch = stream.next_step()[0]
    for sample in range(8):
        told = stream.explain(sample)
        assert told["epoch"] == 0
        segments = batch["segments"][sample]
        assert len(told["documents"]) == int(segments.max()) + 1
        for index, document in enumerate(told["documents"]):
            ids = batch["input_ids"][sample][segments == index]
            assert len(ids) == document["length"]
            text = (corpus_folder / document["name"]).read_text()
            tokens = [prepared.tokenizer.bos_id, *prepared.tokenizer.encode(text.strip("\n"))]
            assert ids.tolist() == tokens[document["start"] : document["start"] + document["length"]]


def test_eval_batches_are_fixed_and_held_out(prepared):
    trained = {row.tobytes() for row in all_rows(prepared)["input_ids"]}
    for domain in prepared.domains:
        batches, again = (prepared.eval_batches(domain, 3, 4) for _ in range(2))
        assert all(torch.equal(a[k], b[k]) for a, b in zip(batches, again, strict=True) for k in a)
        rows = torch.cat([batch["input_ids"] for batch in batches])
        assert len(rows) == min(12, prepared.summary["domains"][domain]["holdout_rows"])
        assert not any(row.numpy().tobytes() in trained for row in rows)
        assert len({row.numpy().tobytes() for row in rows}) == len(rows)


def test_bytes_of_held_out_targets_are_the_bytes_of_the_held_out_text(prepared):
    table = pq.read_table(prepared._corpus / "documents.parquet", filters=[("split", "=", "holdout")])
    for domain in prepared.domains:
        size = sum(table.filter(pc.equal(table["domain"], domain))["bytes"].to_pylist())
        assert prepared.eval_bytes(domain, 7, 1000) == size
        batches = prepared.eval_batches(domain, 2, 2)
        text = [prepared.tokenizer.decode(row[row != IGNORE]) for batch in batches for row in batch["labels"]]
        assert prepared.eval_bytes(domain, 2, 2) == sum(len(part.encode()) for part in text)  # the text is ASCII


def test_compressors_are_gzip_and_xz(prepared, tmp_path):
    """The programs themselves, on the same bytes; gzip's file has a header with a name and a time."""
    for domain in prepared.domains:
        ids = np.concatenate([b["labels"][b["labels"] != IGNORE] for b in prepared.eval_batches(domain, 1, 1000)])
        assert set(prepared.compressors(domain)) == {"gzip", "xz"}
        assert len(ids)
    text = b"".join(Path(path).read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    (tmp_path / "text").write_bytes(text)
    bits = compressor_bits([text[:1000], text[1000:]])
    for name in COMPRESSORS:
        out = subprocess.run([name, "-9", "-c", str(tmp_path / "text")], check=True, capture_output=True).stdout
        assert bits[name] == pytest.approx(8 * len(out) / len(text), abs=8 * 64 / len(text)), name


def test_masked_targets_have_no_bytes(corpus_folder, tmp_path):
    prepared = prepare(str(corpus_folder), task="masked_lm", cache_dir=str(tmp_path), **OPTIONS)
    assert prepared.eval_bytes("a", 2, 2) is None


def test_a_given_tokenizer_is_used(corpus_folder, tmp_path):
    tokenizer = train_tokenizer([write_text(1, 500)], 300)
    tokenizer.save(tmp_path / "tok")
    prepared = prepare(str(corpus_folder), tokenizer=str(tmp_path / "tok"), cache_dir=str(tmp_path), **OPTIONS)
    assert prepared.vocab_size == 300
    assert prepared.tokenizer.encode("bal cet") == tokenizer.encode("bal cet")


def test_a_tokenizer_at_another_place_makes_no_other_entry(corpus_folder, tmp_path):
    """Its content counts: so the text that fine-tunes of one model forget is prepared once."""
    entries = []
    for name, text in (("one", "the words of one"), ("two", "the words of one"), ("three", "of a third tokenizer")):
        train_tokenizer([text * 30], 300).save(tmp_path / name)
        prepare(str(corpus_folder), tokenizer=str(tmp_path / name), seq_len=32, cache_dir=str(tmp_path / "cache"))
        entries.append({path.name for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()})
    assert entries[0] == entries[1] < entries[2]


def test_masked_lm_needs_a_mask_token(corpus_folder, tmp_path):
    tokenizer = train_tokenizer([write_text(1, 500)], 300)
    text = tokenizer.backend.to_str().replace("<|mask|>", "<other>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="mask token"):
        prepare(str(corpus_folder), task="masked_lm", tokenizer=str(tmp_path), cache_dir=str(tmp_path))


def test_masked_batches(corpus_folder, tmp_path):
    prepared = prepare(str(corpus_folder), task="masked_lm", cache_dir=str(tmp_path), **OPTIONS)
    tokenizer = prepared.tokenizer
    plain = prepared._rows["train"].gather(np.arange(prepared._rows["train"].packing.num_rows))
    num = len(plain["input_ids"])
    domain = np.repeat(np.arange(3), [prepared.num_rows[d] for d in prepared.domains])
    row = np.concatenate([np.arange(prepared.num_rows[d]) for d in prepared.domains])

    def batch(first_sample, seed=9):
        return prepared.train_arrays(Picks(first_sample + np.arange(num), domain, domain * 0, row), seed)

    masked = batch(0)
    target = masked["labels"] != IGNORE
    special = np.isin(plain["input_ids"], tokenizer.special_ids)
    padding = plain["segments"] < 0
    assert not (target & (special | padding)).any()
    assert (masked["labels"][target] == plain["input_ids"][target]).all()
    assert (masked["input_ids"][~target] == plain["input_ids"][~target]).all()
    usable = (~special & ~padding).sum()
    assert target.sum() / usable == pytest.approx(0.15, abs=0.015)
    inputs, labels = masked["input_ids"][target], masked["labels"][target]
    assert (inputs == tokenizer.mask_id).mean() == pytest.approx(0.8, abs=0.04)
    assert (inputs == labels).mean() == pytest.approx(0.1, abs=0.03)
    assert target[(~special & ~padding).any(1)].any(1).all(), "a row without a target"
    assert all((batch(0)[k] == masked[k]).all() for k in masked), "masks depend on more than the sample"
    assert (batch(num)["labels"] != masked["labels"]).any(), "the next epoch is masked alike"
    assert (batch(0, seed=8)["labels"] != masked["labels"]).any()
    for name, value in prepared.eval_batches("a", 2, 1)[0].items():
        assert torch.equal(value, prepared.eval_batches("a", 2, 1)[0][name])


def test_cache_dir_defaults_to_the_users(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepared = prepare(str(corpus_folder), **OPTIONS)
    assert prepared.folder.is_relative_to(Path(tmp_path) / "tilewright")
