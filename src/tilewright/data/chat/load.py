"""Where a chat template comes from: the model's folder, a file, or the built-in one, which must be asked for."""

import json
from pathlib import Path

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.tokenizer_folder import CONFIG

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The layout of OpenAI's chat markup language, for base models that bring none."""

TEMPLATE_FILE = "chat_template.jinja"
_OLD_FILE = "chat_template.json"
_MORE = "additional_chat_templates"
_DEFAULT = "default"
SETTING = "data.chat_template"
CHATML_NAME = "chatml"
"""Of the built-in template, as `data.chat_template`."""


def template_source(chosen: str, folder: str, setting: str = SETTING) -> tuple[str, str]:
    """Load a chat template: its text, and where it is from.

    Args:
        chosen: `data.chat_template`: "" for the model's own, "chatml" for the built-in one, the path of a .jinja file
            or of a folder, or the name of one of several templates in the model's folder.
        folder: of the model; "" where there is none.
        setting: which names `chosen`, for errors.

    Raises:
        ConfigError: there is none.
        DataError: a file that cannot be read.
    """
    if chosen == CHATML_NAME:
        return CHATML, "the built-in ChatML"
    own = folder_templates(Path(folder).expanduser()) if folder else {}
    if chosen and chosen not in own:
        return _given(chosen, own, setting)
    name = chosen or _DEFAULT
    if name in own:
        return own[name], folder if name == _DEFAULT else f"{folder}, template {name!r}"
    if own:
        raise ConfigError(
            "Several chat templates and none of them the default",
            got=f"{folder} with {', '.join(sorted(own))}",
            need="the name of one",
            try_=f'{setting} = "{min(own)}"',
            where=setting,
        )
    raise ConfigError(
        "No chat template",
        got=f"{folder} without {TEMPLATE_FILE} and without chat_template in {CONFIG}" if folder else "no model folder",
        need="the template that the model was trained with; a base model has none",
        try_=f'{setting} = "chatml"   (teach a base model this layout)\nor {setting} = a .jinja file',
        where=setting,
    )


def chosen_template(chosen: str, folder: str) -> str | None:
    """Load the chat template that is chosen, or the default of a model's folder; None where there is neither.

    Args:
        chosen: as in `template_source`.
        folder: as in `template_source`.

    Raises:
        ConfigError: what is chosen is not there.
        DataError: a file that cannot be read.
    """
    own = folder_templates(Path(folder).expanduser()) if folder else {}
    return template_source(chosen, folder)[0] if chosen else own.get(_DEFAULT)


def _given(chosen: str, own: dict[str, str], setting: str) -> tuple[str, str]:
    path = Path(chosen).expanduser()
    if path.is_dir():
        found = folder_templates(path)
        if _DEFAULT in found:
            return found[_DEFAULT], chosen
    elif path.is_file():
        return _read(path), chosen
    raise ConfigError(
        "No chat template of this name or at this path",
        got=repr(chosen[:200]),
        need=f'"{CHATML_NAME}", a .jinja file, or a folder with a {TEMPLATE_FILE}'
        + (f", or one of {', '.join(sorted(own))}" if own else ""),
        try_=f'{setting} = ""   (the model\'s own)' if own else f'{setting} = "chatml"',
        where=setting,
    )


def folder_templates(folder: Path) -> dict[str, str]:
    """Chat templates of a model's folder to load, by name; the one that is used where none is named is "default".

    Read from chat_template.jinja and additional_chat_templates/*.jinja, else from chat_template.json, else from
    tokenizer_config.json.

    Raises:
        DataError: one of these files cannot be read.
    """
    found = {file.stem: _read(file) for file in sorted((folder / _MORE).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        found[_DEFAULT] = _read(folder / TEMPLATE_FILE)
    for name in (_OLD_FILE, CONFIG):
        if not found and (folder / name).is_file():
            found = _in_json(folder / name)
    return found


def _in_json(file: Path) -> dict[str, str]:
    try:
        values = json.loads(_read(file))
        given = values.get("chat_template")
        if isinstance(given, list):
            given = {str(item["name"]): item["template"] for item in given}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error
    named = given if isinstance(given, dict) else {_DEFAULT: given}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


def named_tokens(folder: Path) -> dict[str, str]:
    """The names of tokens with which a chat template is loaded: `bos_token`, `eos_token` and so on, from the files of a
    tokenizer."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if not (folder / name).is_file():
            continue
        try:
            values = json.loads(_read(folder / name))
        except (ValueError, RecursionError) as error:
            raise _unreadable(folder / name, str(error)) from error
        if not isinstance(values, dict):
            raise _unreadable(folder / name, type(values).__name__)
        more = values.get("extra_special_tokens")
        for key, value in [*values.items(), *(more.items() if isinstance(more, dict) else ())]:
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(key, str) and key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(file, str(error)) from error


def _unreadable(file: Path, why: str) -> DataError:
    return DataError(
        "Chat template cannot be read",
        where=str(file),
        got=why.splitlines()[0][:200] if why else "",
        need="a template as transformers writes it",
        try_="copy the file again, or data.chat_template = a .jinja file",
    )
