"""Facts from the files beside a tokenizer.json: which tokens begin and end a document, and which file is missing.

A folder of Hugging Face's layout names its special tokens in up to four files. They are read in the order of `_FILES`,
the one in which transformers' own tokenizers are the most specific; the first that names a token decides.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.core.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"

_NAMES = {
    "bos_token": ("bos_token", "cls_token"),
    "eos_token": ("eos_token", "sep_token"),
    "pad_token": ("pad_token",),
    "mask_token": ("mask_token",),
}
"""Role -> the names it has in the tokenizer's own files. BERT's [CLS] and [SEP] begin and end a text."""
GENERATION = "generation_config.json"
_MODEL = "config.json"
_FILES = (CONFIG, "special_tokens_map.json", GENERATION, _MODEL)
_OTHER_FORMATS = ("*.model", "vocab.*", "merges.txt", "tekken.json", "*.tiktoken", CONFIG)


def declared_tokens(folder: Path) -> dict[str, str | int]:
    """The tokens that the files of a tokenizer's folder declare: role (`bos_token`, ...) -> the token's text, or its
    id.

    Raises:
        DataError: one of the files is not a JSON object.
    """
    found: dict[str, str | int] = {}
    for file in _FILES:
        values = _read(folder / file)
        for role, names in _NAMES.items():
            named = [token for name in names if (token := _text(values.get(name))) is not None]
            named += [token for name in names if (token := _id(values.get(f"{name}_id"))) is not None]
            if named:
                found.setdefault(role, named[0])
    return found


def declared_stops(folder: Path) -> tuple[int, ...]:
    """The ids at which transformers' `generate` ends a text of the model in `folder`; empty if no file declares any.

    They are the `eos_token_id`, one or a list, of generation_config.json; where there is no such file, of config.json.

    Raises:
        DataError: the file is not a JSON object.
    """
    values = _read(folder / (GENERATION if (folder / GENERATION).is_file() else _MODEL))
    inner = values.get("text_config")
    return _stops_in(values) or (_stops_in(inner) if isinstance(inner, dict) else ())


def special_names(folder: Path) -> tuple[tuple[str, ...], bool]:
    """Names of special tokens in a tokenizer's folder that transformers reads in a text as these tokens, and if it
    reads any.

    They are named in tokenizer_config.json, beside those of tokenizer.json; `split_special_tokens` makes text of all.

    Raises:
        DataError: the file is not a JSON object.
    """
    values = _read(folder / CONFIG)
    lists = [values.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    given = [value for key, value in values.items() if key.endswith("_token")]
    given += [value for more in lists for value in (more.values() if isinstance(more, dict) else more or ())]
    names = (_text(value) for value in given)
    return tuple(dict.fromkeys(name for name in names if name)), values.get("split_special_tokens") is not True


def write_stops(folder: Path, ids: Sequence[int], defaults: Mapping[str, Any] | None = None) -> None:
    """Say in the generation_config.json of a folder which ids end a text; its other keys stay.

    Args:
        folder: of a model or a tokenizer.
        ids: at least one. The order of a file that has the same ids stays.
        defaults: keys that a new file gets beside them.

    Raises:
        DataError: the file that is there is not a JSON object.
        OSError: it cannot be written.
    """
    file = folder / GENERATION
    values = _read(file) if file.is_file() else dict(defaults or {})
    if set(_stops_in(values)) != set(ids):
        values["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _stops_in(values: Mapping[str, Any]) -> tuple[int, ...]:
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a folder that decide what `load_tokenizer(path)` returns, the tokenizer.json first."""
    file = path / TOKENIZER if path.is_dir() else path
    return [found for found in (file, *(file.with_name(name) for name in _FILES)) if found.is_file()]


def tokenizer_at(path: Path | str) -> Path:
    """The tokenizer.json of a folder, or the file itself.

    Raises:
        DataError: there is none.
    """
    path = Path(path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        return file
    raise DataError(
        "No tokenizer at this path",
        where="data.tokenizer",
        got=f"{path}, {'a folder without tokenizer.json' if path.is_dir() else 'which does not exist'}",
        need="a tokenizer.json (Hugging Face tokenizers), or a folder that holds one",
        try_='data.tokenizer = ""   (train one on the data)',
    )


def folder_tokenizer(folder: str) -> str:
    """The tokenizer of a model's folder, whose ids its weights know.

    Returns:
        The folder, where it holds a tokenizer.json.

    Raises:
        ConfigError: it holds none.
    """
    path = Path(folder).expanduser()
    if (path / TOKENIZER).is_file():
        return str(path)
    others = sorted({file.name for pattern in _OTHER_FORMATS for file in path.glob(pattern)})
    ways = f'a copy of that file in {path}; in a recipe also data.tokenizer = its path, or model.weights = "random"'
    if others:
        load = f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')"
        ways = f'python -c "from transformers import AutoTokenizer; {load}"\nor {ways}'
    raise ConfigError(
        "No usable tokenizer in the folder of the loaded weights",
        got=f"{path} with {', '.join(others)}" if others else f"{path} without a tokenizer",
        need="the tokenizer.json that the weights were trained with: ids of another tokenizer mean other words",
        try_=ways,
        where="model.path",
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _not_an_object(file, str(error)) from error
    if not isinstance(values, dict):
        raise _not_an_object(file, type(values).__name__)
    return values


def _not_an_object(file: Path, got: str) -> DataError:
    return DataError(
        "Unreadable file of special tokens",
        where=str(file),
        got=got.splitlines()[0][:200],
        need="a JSON object",
        try_="copy the file again, or delete it",
    )


def _text(value: Any) -> str | None:
    """A token of a tokenizer's folder named by its text, alone or in an object of `content` and flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _id(value: Any) -> int | None:
    """A token of a tokenizer's folder named by its id, or by the first of several."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else None
