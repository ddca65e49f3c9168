"""`prepare`: from a data source to rows ready to train on, cached on disk.

Two entries: the encoded text (`corpus`, by far the larger part of the work) and its packing into rows, which alone
depends on the row length and the task. This is the only function that most callers need, with `Stream`.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import platformdirs
import tokenizers
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.core.subprocess_call import answer, call_module
from tilewright.data.batches.build_rows import build_rows
from tilewright.data.chat.chat_rows import PREFERENCES
from tilewright.data.chat.load import chosen_template, template_source
from tilewright.data.chat.pack_conversations import pack_chat
from tilewright.data.common.cache_entries import cached
from tilewright.data.common.progress import timed
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.common.tokenizer_folder import declared_stops, tokenizer_files
from tilewright.data.corpus.build import build_corpus
from tilewright.data.corpus.chat import build_chat
from tilewright.data.dataset.open_built import INSTALLED, built_at, built_tokens
from tilewright.data.dataset.prepared_chat import PreparedChat
from tilewright.data.dataset.prepared_images import PreparedImages, open_built_images, prepare_images
from tilewright.data.dataset.prepared_text import PreparedData, need_mask
from tilewright.data.dataset.remote.open_remote import addresses_of, check_text, open_far
from tilewright.data.dataset.remote.prepared_shards import Streaming
from tilewright.data.engine.shipped.build_installed import build_entry, build_key, installed_build
from tilewright.data.sources.installed_text import InstalledText, list_installed
from tilewright.data.sources.path_purpose import wanted, wanted_validation
from tilewright.data.sources.user_files import several_sources, user_source
from tilewright.data.stages.merge_shards import TOKENS

Prepared = TypeVar("Prepared", PreparedData, PreparedChat)
_STREAMING = Streaming()
_CHAT_FORMAT = 8  # of entries of conversations
_FORMAT = 7  # of the cache entries; a change makes old entries unused


def prepare(
    source: str = "installed",
    *,
    sources: Mapping[str, str] | None = None,
    format: Literal["text", "chat", "preferences"] = "text",
    chat_template: str = "",
    model_folder: str = "",
    task: str = "causal_lm",
    domains: tuple[str, ...] = (),
    max_bytes: int = 24_000_000,
    holdout: float = 0.02,
    validation: str = "",
    seq_len: int = 512,
    rows: Literal["packed", "documents"] = "packed",
    vocab_size: int = 8192,
    tokenizer: str = "",
    text_field: str = "text",
    image_size: int = 64,
    cache_dir: str = "",
    seed: int = 0,
    processes: int = 1,
    own_process: bool = False,
    setting: str = "data.source",
    streaming: Streaming = _STREAMING,
) -> PreparedData | PreparedChat | PreparedImages:
    """Prepare the data of a run, or find it prepared.

    Args:
        source: "installed", a path to the user's data, or the folder of a built dataset (`data.build`), which brings
            its own tokenizer and held-out part; or its address, from where it is read in shards during a run.
            Not read where `sources` are given.
        sources: several paths, or addresses of built datasets, each a domain of the name that it is given.
        format: what rows hold: text, conversations, or pairs of a preferred and another answer.
        chat_template: see `chat.load.template_source`. Of chat and preferences.
        model_folder: of the model whose template is used where none is chosen.
        task: causal_lm, masked_lm or image_classification.
        domains: keep only these; empty: all.
        max_bytes: most text to use, shared over the domains; 0: no limit. Not read for images.
        holdout: share held out for evaluation, by clusters of near-copies. 0: nothing, or the validation text.
        validation: a path to text of the same format that is held out as a whole, where `holdout` is 0.
        seq_len: positions in a row.
        rows: "packed": of one length, of several documents. "documents": one in each, for `Stream(documents=True)`;
            longer ones are split. Not read for images, and of preferences a row is a pair.
        vocab_size: of the tokenizer trained on the data. Not read where `tokenizer` is given.
        tokenizer: a tokenizer.json or a folder with one; empty: train one.
        text_field: field of rows that holds the text.
        image_size: side in pixels that images are brought to.
        cache_dir: where prepared data is kept; empty: the user's cache folder.
        seed: which text is sampled and held out. Not the order of training: keep it, and runs stay comparable.
        processes: which build the installed text together. Above 1, a script needs `if __name__ == "__main__"`.
        own_process: what is not there yet is made by a process of its own, so that what this takes of memory (a
            hundred MiB, much of which a process does not get rid of) is not in the one that continues. It uses all
            cores.
        setting: which names `source`, for errors.
        streaming: how shards of datasets at addresses (`scheme://...`) are read during a run.

    Raises:
        DataError: nothing usable in the source, or a cache folder that cannot be written.
        HardwareError: the process of its own was killed.
    """
    arguments = {
        name: value for name, value in locals().items() if name not in ("own_process", "processes", "streaming")
    }
    seconds: dict[str, float] = {}

    def elsewhere() -> None:
        seconds.update(call_module(__name__, **arguments))

    before = elsewhere if own_process else None
    root = Path(cache_dir).expanduser() if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    root = root / "data"
    kind = {} if rows == "packed" else {"rows": rows}  # entries of packed rows have their names from before
    if addresses := addresses_of(source, sources or {}, setting):
        check_text(task, format)
        far = open_far(addresses, root, streaming, tokenizer, domains, seconds)
        rows_key = _key("rows", far.fingerprint, task=task, seq_len=seq_len, domains=domains, **kind)
        build = _builder(seconds, build_rows, far.corpus, task, seq_len, domains, rows)
        return _timed(far.prepared(cached(root, rows_key, build)), seconds)
    built_folder = None if sources else built_at(source)
    if task == "image_classification" and built_folder is not None:
        return open_built_images(built_folder, image_size)
    if task == "image_classification":
        return prepare_images(source, root, image_size=image_size, holdout=holdout, seed=seed, before=before)
    if built_folder is not None:
        template = None if format == "text" else chosen_template(chat_template, model_folder)
        built = built_tokens(built_folder, format, tokenizer, domains, template)
        if task == "masked_lm":
            need_mask(load_tokenizer(built.tokens / "tokenizer"))
        rows_key = _key("rows", built.fingerprint, task=task, seq_len=seq_len, domains=domains, **kind)
        if format != "text":
            pairs = format == PREFERENCES
            build = _builder(seconds, pack_chat, built.tokens, pairs, seq_len, rows, domains)
            return _timed(PreparedChat(built.tokens, cached(root, rows_key, build, before), pairs), seconds)
        build = _builder(seconds, build_rows, built.tokens, task, seq_len, domains, rows)
        packed = cached(root, rows_key, build, before)
        return _timed(PreparedData(built.tokens, packed), seconds)
    field = text_field if format == "text" else None
    want = wanted(format, setting)
    if sources:
        found = several_sources(sources, field, domains, want)
    else:
        found = list_installed() if source == INSTALLED else user_source(source, field, domains, want)
    own = user_source(validation, field, want=wanted_validation(format)) if validation and not holdout else None
    if task == "masked_lm" and tokenizer:
        need_mask(load_tokenizer(tokenizer))
    settings = {
        "domains": tuple(domains),
        "max_bytes": max_bytes,
        "holdout": holdout,
        "vocab_size": 0 if tokenizer else vocab_size,
        "seed": seed,
    }
    # The content of a given tokenizer counts, not where it is: runs of one model share what their text becomes.
    keys = [found.key, *([own.key] if own else [])]
    key = _key("text", *keys, _FORMAT, tokenizers.__version__, _tokenizer_digest(tokenizer), **settings)
    settings |= {"vocab_size": vocab_size, "tokenizer": tokenizer}
    both = settings | {"validation": own}
    if format != "text":
        template, _ = template_source(chat_template, model_folder or tokenizer)
        pairs = format == PREFERENCES
        chat = {"pairs": pairs, "chat_template": chat_template, "model_folder": model_folder}
        stops = declared_stops(Path(model_folder or tokenizer).expanduser()) if model_folder or tokenizer else ()
        key = _key(format, key, template, _CHAT_FORMAT, stops)
        found = found.source() if isinstance(found, InstalledText) else found
        encoded = cached(root, key, _builder(seconds, build_chat, found, **both, **chat), before)
        rows_key = _key("rows", key, seq_len=seq_len, **kind)
        packed = cached(root, rows_key, _builder(seconds, pack_chat, encoded, pairs, seq_len, rows), before)
        return _timed(PreparedChat(encoded, packed, pairs), seconds)
    if isinstance(found, InstalledText):
        build = installed_build(**settings)
        key = _key("text", key, build_key(build))
        unfinished = root / f"{key}.build"
        corpus = cached(root, key, _builder(seconds, build_entry, build, found, unfinished, processes), before) / TOKENS
        shutil.rmtree(unfinished, ignore_errors=True)
    else:
        corpus = cached(root, key, _builder(seconds, build_corpus, found, **both), before)
    rows_key = _key("rows", key, task=task, seq_len=seq_len, **kind)
    packed = cached(root, rows_key, _builder(seconds, build_rows, corpus, task, seq_len, (), rows), before)
    return _timed(PreparedData(corpus, packed), seconds)


def _timed(prepared: Prepared, seconds: dict[str, float]) -> Prepared:
    prepared.summary["seconds"] = seconds
    return prepared


def _builder(
    seconds: dict[str, float], what: Callable[..., None], *args: object, **kwargs: object
) -> Callable[[Path], None]:
    """Builder for `prepare`: builds an entry with `what` and notes what its phases took."""
    return lambda folder: seconds.update(timed("preparing data", what, folder, *args, **kwargs))


def _tokenizer_digest(path: str) -> str:
    """Digest for `prepare` of the given tokenizer and of the files that name its special tokens, "" where there is
    none.

    Raises:
        DataError: it cannot be read.
    """
    if not path:
        return ""
    load_tokenizer(path)
    return "".join(f"{file.name}:{hash_file(file)} " for file in tokenizer_files(Path(path).expanduser()))


def _in_own_process(domains: list[str], **rest: Any) -> dict[str, float]:
    """Prepare the data in a process of its own; returns the seconds of its phases there."""
    prepared = prepare(domains=tuple(domains), processes=len(os.sched_getaffinity(0)), **rest)
    return prepared.summary.get("seconds", {})


def _key(kind: str, *values: object, **named: object) -> str:
    text = json.dumps([values, sorted(named.items())])
    return f"{kind}-{xxhash.xxh3_64_hexdigest(text.encode())}"


if __name__ == "__main__":
    answer(_in_own_process)
