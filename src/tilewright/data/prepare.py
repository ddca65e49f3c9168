"""`prepare`: from a data source to rows ready to train on, cached on disk.

Two entries: the encoded text (`corpus`, by far the larger part of the work) and its packing into rows, which alone
depends on the row length and the task. This is the only function that most callers need, with `Stream`.
"""

import json
from pathlib import Path

import numpy as np
import platformdirs
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tokenizers
import xxhash

from tilewright.data.cache import cached, file_digest
from tilewright.data.corpus import SPLITS, build_corpus
from tilewright.data.files import user_source
from tilewright.data.images import PreparedImages, prepare_images
from tilewright.data.installed import installed_source
from tilewright.data.pack import Packing, pack
from tilewright.data.prepared import PreparedData, need_mask
from tilewright.data.progress import Progress
from tilewright.data.tokenizer import load_tokenizer

_FORMAT = 1  # of the cache entries; a change makes old entries unused


def prepare(
    source: str = "installed",
    *,
    task: str = "causal_lm",
    domains: tuple[str, ...] = (),
    max_bytes: int = 24_000_000,
    holdout: float = 0.02,
    seq_len: int = 512,
    vocab_size: int = 8192,
    tokenizer: str = "",
    text_field: str = "text",
    image_size: int = 64,
    cache_dir: str = "",
    seed: int = 0,
) -> PreparedData | PreparedImages:
    """Prepare the data of a run, or find it prepared.

    Args:
        source: "installed", or a path to the user's data.
        task: causal_lm, masked_lm or image_classification.
        domains: keep only these; empty: all.
        max_bytes: most text to use, shared over the domains; 0: no limit. Not read for images.
        holdout: share held out for evaluation, by clusters of near-copies.
        seq_len: positions in a row.
        vocab_size: of the tokenizer trained on the data. Not read where `tokenizer` is given.
        tokenizer: a tokenizer.json or a folder with one; empty: train one.
        text_field: field of rows that holds the text.
        image_size: side in pixels that images are brought to.
        cache_dir: where prepared data is kept; empty: the user's cache folder.
        seed: which text is sampled and held out. Not the order of training: keep it, and runs stay comparable.

    Raises:
        DataError: nothing usable in the source, or a cache folder that cannot be written.
    """
    root = Path(cache_dir).expanduser() if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    root = root / "data"
    if task == "image_classification":
        return prepare_images(source, root, image_size=image_size, holdout=holdout, seed=seed)
    found = installed_source() if source == "installed" else user_source(source, text_field, domains)
    if task == "masked_lm" and tokenizer:
        need_mask(load_tokenizer(tokenizer))
    settings = {
        "domains": tuple(domains),
        "max_bytes": max_bytes,
        "holdout": holdout,
        "vocab_size": 0 if tokenizer else vocab_size,
        "tokenizer": tokenizer,
        "seed": seed,
    }
    with Progress("preparing data") as progress:
        key = _key("text", found.key, _FORMAT, tokenizers.__version__, _tokenizer_digest(tokenizer), **settings)
        settings["vocab_size"] = vocab_size
        corpus, _ = cached(root, key, lambda f: build_corpus(f, found, progress=progress, **settings))
        rows_key = _key("rows", key, task=task, seq_len=seq_len)
        packed, _ = cached(root, rows_key, lambda f: _build_rows(f, corpus, task, seq_len, progress))
    prepared = PreparedData(corpus, packed)
    prepared.summary["seconds"] = progress.seconds
    return prepared


def _build_rows(folder: Path, corpus: Path, task: str, seq_len: int, progress: Progress) -> None:
    """Pack both splits of `corpus`, domain by domain, and write the tables and their meaning."""
    progress.phase("packing")
    table = pq.read_table(corpus / "documents.parquet", columns=["split", "domain", "length"])
    digest = xxhash.xxh3_128(f"{task}\0{seq_len}".encode())
    ranges: dict[str, dict[str, list[int]]] = {}
    utilisation = 1.0
    for split in SPLITS:
        here = table.filter(pc.equal(table["split"], split))
        lengths = here["length"].to_numpy()
        domain_of = np.array(here["domain"].to_pylist())
        packing, ranges[split] = _pack_domains(lengths, domain_of, seq_len, shifted=task == "causal_lm")
        digest.update((file_digest(corpus / f"{split}.npy") + json.dumps(ranges[split])).encode())
        for name, array in (("starts", packing.starts_P), ("lengths", packing.lengths_P), ("first", packing.first_R)):
            digest.update(array.tobytes())
            np.save(folder / f"{split}.{name}.npy", array)
        if split == "train":
            utilisation = packing.utilisation(seq_len)
    summary = json.loads((corpus / "summary.json").read_bytes())
    summary["utilisation"] = round(utilisation, 5)
    for split, name in (("train", "rows"), ("holdout", "holdout_rows")):
        for domain, (first, stop) in ranges[split].items():
            summary["domains"][domain][name] = stop - first
    meta = {
        "fingerprint": digest.hexdigest(),
        "task": task,
        "seq_len": seq_len,
        "rows": ranges,
        "summary": summary,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False))


def _pack_domains(
    lengths: np.ndarray, domain_of: np.ndarray, seq_len: int, shifted: bool
) -> tuple[Packing, dict[str, list[int]]]:
    """One packing of all domains, each in rows of its own, and the row range of each.

    A document of n stream positions gives n - 1 pairs of input and next token, or n tokens where nothing is shifted.
    """
    starts = np.cumsum(lengths) - lengths
    packings, ranges, row = [], {}, 0
    for domain in sorted(set(domain_of.tolist())):
        here = domain_of == domain
        packings.append(pack(starts[here], lengths[here] - shifted, seq_len))
        ranges[domain] = [row, row + packings[-1].num_rows]
        row += packings[-1].num_rows
    counts = np.concatenate([np.diff(p.first_R) for p in packings])
    first = np.append(0, np.cumsum(counts))
    starts_P = np.concatenate([p.starts_P for p in packings])
    return Packing(starts_P, np.concatenate([p.lengths_P for p in packings]), first), ranges


def _tokenizer_digest(path: str) -> str:
    """Content of the user's tokenizer, "" where there is none. Raises DataError where it cannot be read."""
    if not path:
        return ""
    load_tokenizer(path)
    given = Path(path).expanduser()
    folder = given if given.is_dir() else given.parent
    files = [folder / "tokenizer.json" if given.is_dir() else given, folder / "tokenizer_config.json"]
    return "".join(file_digest(file) for file in files if file.is_file())


def _key(kind: str, *values: object, **named: object) -> str:
    text = json.dumps([values, sorted(named.items())])
    return f"{kind}-{xxhash.xxh3_64_hexdigest(text.encode())}"
