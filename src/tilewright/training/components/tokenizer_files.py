"""The tokenizer that leaves a run with its model: ids as in training, begin and end of a text, template, length.

A run keeps the tokenizer that made its ids, and the roles of its tokens. An artefact needs more, and all artefacts of a
run
the same: which tokens a runtime puts around a text, the chat template, and how long a text may be. Weights that were
loaded bring these along from their folder; a model that was trained here begins each text as its documents began.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import DataError
from tilewright.core.log import say
from tilewright.data.chat.load import folder_templates
from tilewright.data.chat.template import ChatTemplate, stops_of
from tilewright.data.common.guarded_tokenizer import reader_of
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.common.tokenizer_folder import CONFIG, TOKENIZER
from tilewright.models.folder.find_model import local_folder

TEMPLATE = "chat_template.jinja"
_DEFAULT = "default"
_OF_ITS_OWN = ("tokenizer_class", "auto_map", "chat_template", "added_tokens_decoder", "tokenizer_file", "name_or_path")
"""Keys of a loaded model's tokenizer_config.json that are not taken over: code, and what other files hold."""


@dataclass(frozen=True)
class TextRules:
    """Treatment of a text by an artefact beside splitting it.

    Args:
        begin, end: ids that are put around a text.
        template: of conversations; None where the model has none.
        config: keys of tokenizer_config.json that the loaded weights brought.
        stops: ids that end an answer or a text (`stops.stops_of`).
        taught: the token that the run taught to end an answer, where the loaded weights declare others: the artefact's
            end of a text. None where it stays what it was.
        named: whether the template may call it `eos_token` too, and renders the same.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    template: str | None
    config: Mapping[str, Any]
    stops: tuple[int, ...] = ()
    taught: int | None = None
    named: bool = False

    @classmethod
    def of(cls, recipe: Recipe, run: Path, tokenizer: Tokenizer) -> "TextRules":
        """The rules of the tokenizer's files for a run's model.

        Args:
            recipe: of the run.
            run: its folder.
            tokenizer: of the run.

        Raises:
            DataError: files beside the loaded weights that cannot be read.
        """
        config = _config_of(recipe)
        begin, end = surround(tokenizer, config) if recipe.model.weights == "load" else _of_documents(recipe, tokenizer)
        folder = template_folder(recipe, run)
        if folder is None:
            return cls(begin, end, None, config, stops_of(tokenizer, None).ids)
        source = folder_templates(folder)[_DEFAULT]
        try:
            chat = ChatTemplate.load(str(folder), tokenizer)
            taught, stops = _taught(recipe, chat), chat.stops.ids
            named = taught is not None and chat.renders_with(
                {"eos_token": str(chat.tokenizer.backend.id_to_token(taught))}
            )
        except DataError as error:  # the text goes with the model all the same: it may be right for others
            say(f"note: the chat template of {folder} ends no answer: {error.problems[0].got}", error=True)
            return cls(begin, end, source, config, stops_of(tokenizer, None).ids)
        return cls(begin, end, source, config, stops, taught, named)

    def eos_id(self, tokenizer: Tokenizer) -> int:
        """The id of the end of a text as the tokenizer of the run's model has it."""
        return self.taught if self.taught is not None and self.named else tokenizer.eos_id


def _taught(recipe: Recipe, chat: ChatTemplate) -> int | None:
    """The token that ends an answer in the chat template, if the run trained conversations and no loaded file declares
    it. A token that begins the next turn ends no text: it is a stop, and the end of a text stays."""
    own = chat.ending
    if recipe.data.format == "text" or own.id is None or own.closing or own.id in chat.tokenizer.stop_ids:
        return None
    return own.id


def template_folder(recipe: Recipe, run: Path) -> Path | None:
    """The folder with the chat template for the tokenizer's files of a run's model: the run's, else that of the loaded
    weights, else that of the tokenizer that the recipe names. None where no one has a default template.

    Raises:
        DataError: a template that cannot be read.
    """
    loaded = local_folder(recipe.model.path) if recipe.model.weights == "load" else ""
    named = [Path(name).expanduser() for name in (loaded, recipe.data.tokenizer) if name]
    folders = [run, *(path if path.is_dir() else path.parent for path in named)]
    return next((folder for folder in folders if _DEFAULT in folder_templates(folder)), None)


def surround(tokenizer: Tokenizer, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer puts before and after a text.

    Args:
        tokenizer: of a model.
        config: its tokenizer_config.json, where `add_bos_token` and `add_eos_token` decide before tokenizer.json does.

    Example:
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["low lower lowest " * 20], 300)
        >>> surround(tokenizer, {}), surround(tokenizer, {"add_bos_token": True})
        (((), ()), ((0,), ()))
    """
    given = {name: config[name] for name in ("add_bos_token", "add_eos_token") if isinstance(config.get(name), bool)}
    if given:  # transformers 5 makes its post-processor of these two alone where one is there
        begin = (tokenizer.bos_id,) if given.get("add_bos_token") else ()
        return begin, (tokenizer.eos_id,) if given.get("add_eos_token") else ()
    return _around(tokenizer.backend)


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    reader = reader_of(backend)
    plain, whole = reader.encode("a").ids, reader.encode("a", special=True).ids
    starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    at = starts[0] if starts else 0
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def write_tokenizer(recipe: Recipe, run: Path, rules: TextRules, positions: int | None, target: Path) -> None:
    """Write the tokenizer's files into a model's folder.

    Args:
        recipe: of the run.
        run: its folder, with the tokenizer and maybe a chat template.
        rules: of the run's model.
        positions: most tokens that the model knows; None where nothing says so.
        target: the model's folder.

    Raises:
        OSError: a file cannot be written.
        DataError: files beside the loaded weights that cannot be read.
    """
    backend = tokenizers.Tokenizer.from_file(str(run / TOKENIZER))
    if _around(backend) != (rules.begin, rules.end):
        backend.post_processor = _processor(backend, rules.begin, rules.end)
        (target / TOKENIZER).write_text(backend.to_str(pretty=True), encoding="utf-8")
    else:
        shutil.copyfile(run / TOKENIZER, target / TOKENIZER)
    own = json.loads((run / CONFIG).read_bytes()) if (run / CONFIG).is_file() else {}
    config = {name: value for name, value in rules.config.items() if name not in _OF_ITS_OWN} | own
    if recipe.model.weights == "random" and recipe.model.task == "causal_lm":
        config["add_bos_token"] = True  # converters of other projects look here
    if rules.taught is not None and rules.named:
        config["eos_token"] = backend.id_to_token(rules.taught)
    if positions is not None:
        config.setdefault("model_max_length", positions)
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if rules.template is not None:
        (target / TEMPLATE).write_text(rules.template, encoding="utf-8")


def _of_documents(recipe: Recipe, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (tokenizer.bos_id,), (tokenizer.eos_id,) if recipe.model.task == "masked_lm" else ()


def surrounding(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The tokenizer of a run's files, which puts around a prompt what it has in the run's artefacts."""
    if recipe.model.weights == "load":  # as it came with the weights
        return tokenizer
    begin, end = _of_documents(recipe, tokenizer)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
    backend.post_processor = _processor(backend, begin, end)
    return replace(tokenizer, backend=backend)


def _processor(backend: tokenizers.Tokenizer, begin: Sequence[int], end: Sequence[int]) -> Any:
    before = [str(backend.id_to_token(i)) for i in begin]
    after = [str(backend.id_to_token(i)) for i in end]
    ids = [(str(backend.id_to_token(i)), i) for i in dict.fromkeys([*begin, *end])]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=ids,
    )


def _config_of(recipe: Recipe) -> dict[str, Any]:
    """The file tokenizer_config.json beside the tokenizer that loaded weights, or a recipe, brought; empty where there
    is none."""
    path = recipe.data.tokenizer or (local_folder(recipe.model.path) if recipe.model.weights == "load" else "")
    folder = Path(path).expanduser()
    file = (folder if folder.is_dir() else folder.parent) / CONFIG
    if not path or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            "Unreadable tokenizer_config.json of the loaded weights",
            where=str(file),
            got=str(error).splitlines()[0][:200],
            need="a JSON object",
            try_="copy the file again, or delete it",
        ) from error
    return found if isinstance(found, dict) else {}
