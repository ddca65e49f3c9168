"""The models that scores are made by: from references or a sample of the corpus to files, and from files to scores.

A sample of the corpus is two samples, of halves by a hash of the text. Each has a model of its own, and a record is
scored by that of the other half, so that no record is scored by a model that was trained on it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tilewright.core.errors import DataError
from tilewright.data.engine.build_files import Listing
from tilewright.data.stages.scores.classifier import load_quality, train_quality
from tilewright.data.stages.scores.keep_by_score import Scorer
from tilewright.data.stages.scores.ngram_model import NgramModel, bits_per_byte, train_ngrams
from tilewright.data.stages.scores.noise_contrast import joined, train_contrast, verified
from tilewright.data.stages.scores.reference_texts import (
    Piece,
    corpus_sample,
    folder_sample,
    half_of,
    labelled_sample,
)

ACCOUNT = "account.json"
"""What a model is and what was measured of it."""
_QUALITY, _NGRAMS, _CONTRASTS = "quality.safetensors", "ngrams.safetensors", "contrasts.json"
_LEAST_BYTES = 1 << 10

References = Mapping[str, Listing | Path]
"""What is given, by setting: the files of a folder, or one file."""
CorpusRecords = tuple[Sequence[Path], Sequence[Path]] | None
"""Folders of the records and of the side tables that a sample of the corpus is taken from; None where none is."""


def make_quality(index: int, settings: SimpleNamespace, folder: Path, *, references: References) -> Mapping[str, Any]:
    """Fit the quality model, or take the given one."""
    quality, given = settings.quality, references.get("quality.model")
    if isinstance(given, Path):
        model = load_quality(given)
    else:
        pieces = _examples(settings, references)
        keys: dict[int, set[bool]] = {}
        for piece in pieces:
            keys.setdefault(piece.key, set()).add(bool(piece.label))
        clear = [piece for piece in pieces if len(keys[piece.key]) == 1]
        texts, labels = [piece.data for piece in clear], np.array([bool(piece.label) for piece in clear], bool)
        folds = np.array([piece.key for piece in clear], np.uint64)
        model = train_quality(texts, labels, folds, allow_weak=quality.allow_weak)
        model.account["both_ways"] = len(pieces) - len(clear)
    model.save(folder / _QUALITY)
    _write(folder / ACCOUNT, model.account)
    return {name: model.account[name] for name in ("good", "bad")}


def _examples(settings: SimpleNamespace, references: References) -> list[Piece]:
    limit, rows = settings.quality.example_bytes, references.get("quality.labelled")
    if isinstance(rows, Path):
        return labelled_sample(rows, settings, limit)
    found = []
    for name, label in (("good", True), ("bad", False)):
        for piece in _sample_of(f"quality.{name}", references, settings, limit):
            found.append(Piece(piece.key, piece.number, piece.data, label))
    return found


def quality_scorer(folder: Path) -> Scorer:
    """Scorer of quality by the fitted model in `folder`."""
    model = load_quality(folder / _QUALITY)
    return lambda texts, digests: model.scores(texts)


def make_noise(
    index: int, settings: SimpleNamespace, folder: Path, *, references: References, corpus: CorpusRecords
) -> Mapping[str, Any]:
    """Fit models of clean text and of noise, and write the contrasts of what they have not seen."""
    noise = settings.noise
    noisy = _sample_of("noise.noisy", references, settings, noise.reference_bytes)
    clean = _reference("noise.clean", references, settings, noise.reference_bytes, corpus)
    tensors: dict[str, np.ndarray] = {}
    found = []
    for number, pieces in enumerate(clean):
        models, contrasts = train_contrast(pieces, noisy, noise)
        found.append(contrasts)
        for name, model in zip(("clean", "noise"), models, strict=True):
            tensors |= model.tensors(f"{number}.{name}.")
    save_file(tensors, folder / _NGRAMS)
    (folder / _CONTRASTS).write_text(json.dumps(joined(found)))
    return {"clean": sum(map(len, clean)), "noisy": len(noisy)}


def verify_noise(
    index: int, settings: SimpleNamespace, folder: Path, *, models: Path, of_corpus: bool
) -> Mapping[str, Any]:
    """Write the threshold of contrast of the fitted noise models, and what it does to held-out text."""
    account = verified(json.loads((models / _CONTRASTS).read_bytes()), settings.noise, of_corpus)
    _write(folder / ACCOUNT, account)
    return {"clean": account["clean"]}


def noise_threshold(folder: Path) -> float:
    """Read the contrast above which records go as noise, as `verify_noise` wrote it."""
    return float(json.loads((folder / ACCOUNT).read_bytes())["threshold"])


def contrast_scorer(folder: Path) -> Scorer:
    """Scorer of contrasts by the fitted models in `folder`."""
    tensors = load_file(folder / _NGRAMS)
    pairs = []
    while f"{len(pairs)}.clean.unigram" in tensors:
        pairs.append([NgramModel.of(tensors, f"{len(pairs)}.{name}.") for name in ("clean", "noise")])

    def score(models: list[NgramModel], texts: Sequence[bytes]) -> np.ndarray:
        clean, noise = bits_per_byte(models, texts)
        return np.round(clean - noise, 4)

    return _by_half(pairs, score)


def make_reference(
    index: int, settings: SimpleNamespace, folder: Path, *, references: References, corpus: CorpusRecords
) -> Mapping[str, Any]:
    """Fit the reference model by which records are sampled."""
    sample = settings.sample
    samples = _reference("sample.reference", references, settings, sample.reference_bytes, corpus)
    tensors: dict[str, np.ndarray] = {}
    sizes = [sum(len(piece.data) for piece in pieces) for pieces in samples]
    if min(sizes) < _LEAST_BYTES:
        raise DataError(
            "Too little text for a model to sample by",
            where="sample.reference",
            got=f"{min(sizes)} bytes" + (" in a half of the records" if len(sizes) == 2 else ""),
            need=f"{_LEAST_BYTES} bytes, better some megabytes",
            try_='reference = "FOLDER" with more text' if len(sizes) == 2 else "more text",
        )
    for number, pieces in enumerate(samples):
        tensors |= train_ngrams([piece.data for piece in pieces], sample.order).tensors(f"{number}.")
    save_file(tensors, folder / _NGRAMS)
    account = {"texts": sum(map(len, samples)), "bytes": sum(sizes), "order": sample.order, "models": len(samples)}
    _write(folder / ACCOUNT, account)
    return {"texts": account["texts"], "reference_bytes": account["bytes"]}


def bits_scorer(folder: Path) -> Scorer:
    """Scorer of bits per byte by the fitted models in `folder`, rounded to 0.001."""
    tensors = load_file(folder / _NGRAMS)
    models = []
    while f"{len(models)}.unigram" in tensors:
        models.append([NgramModel.of(tensors, f"{len(models)}.")])
    return _by_half(models, lambda one, texts: np.round(bits_per_byte(one, texts)[0], 3))


def _by_half(models: Sequence[Any], score: Callable[[Any, Sequence[bytes]], np.ndarray]) -> Scorer:
    """Scores by the one fitted model, or of two by that of the other half of the corpus."""

    def scores(texts: Sequence[bytes], digests: np.ndarray) -> np.ndarray:
        if len(models) == 1:
            return score(models[0], texts)
        found = np.zeros(len(texts))
        halves = half_of(digests)
        for half in (0, 1):
            mine = np.flatnonzero(halves == half)
            found[mine] = score(models[1 - half], [texts[i] for i in mine.tolist()])
        return found

    return scores


def _reference(
    setting: str, references: References, settings: SimpleNamespace, limit: int, corpus: CorpusRecords
) -> list[list[Piece]]:
    """The texts of a reference to fit a model to; of the corpus, those of both halves."""
    if corpus is not None:
        return list(corpus_sample(*corpus, limit))
    return [_sample_of(setting, references, settings, limit)]


def _sample_of(setting: str, references: References, settings: SimpleNamespace, limit: int) -> list[Piece]:
    """Take about `limit` bytes of a reference's texts to fit a model to; none if it is not given."""
    listing = references.get(setting)
    return folder_sample(listing, settings, limit, setting) if isinstance(listing, Listing) else []


def _write(path: Path, account: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(account, indent=1, sort_keys=True))
