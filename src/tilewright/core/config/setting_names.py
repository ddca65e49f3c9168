"""A schema in words: field names, what each wants, and near misses of a name. `root` is the recipe, unless another is
given, as the data build's. Nothing here reads files; `core.config.load` does.
"""

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.section import EVERY, Place, Section
from tilewright.core.config.sections.data import MixingStage
from tilewright.core.config.sections.model import LayerSection, named_or_own
from tilewright.core.config.sections.precision import PrecisionRule
from tilewright.core.config.toml import NONE
from tilewright.core.units import parse_bytes

EXTENDS = "extends"
_COMPARED = 80  # characters of a name that is compared with ours, which takes the square of the length


@dataclass(frozen=True)
class Field:
    """One setting of the recipe's schema. `path` is `section.field`."""

    path: str
    info: FieldInfo

    @property
    def doc(self) -> str:
        """Text of a setting under its field in `core.config.recipe`, on one line."""
        return " ".join((self.info.description or "").split())

    @property
    def wants(self) -> str:
        """Allowed values of a setting by its name, in words."""
        if any(getattr(item, "func", None) is parse_bytes for item in self.info.metadata):
            return 'a size like "24GiB", "500MB" or 1024'
        either = _describe(self.info.annotation) + _bounds(self.info.metadata)
        named = any(getattr(item, "func", None) is named_or_own for item in self.info.metadata)
        return either + ", or package.module:NAME of your own" if named else either

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed texts of a setting that is a choice and nothing else; else empty."""
        kind = _without_none(self.info.annotation)
        return tuple(map(str, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else ()

    @property
    def is_text(self) -> bool:
        """True where every value of a setting is a text, so that `--run.name 7` means "7"."""
        return self.info.annotation is str or bool(self.choices)

    @property
    def place(self) -> Place | None:
        """The mark of a setting by whose name a path is given; None for all others."""
        return next((item for item in self.info.metadata if isinstance(item, Place)), None)

    @property
    def is_bool(self) -> bool:
        return self.info.annotation is bool

    @property
    def may_be_none(self) -> bool:
        return type(None) in typing.get_args(self.info.annotation)


def sections(root: type[BaseModel] = Recipe) -> dict[str, type[BaseModel]]:
    """Names of sections of settings, in the order of the schema; one inside another as `outer.inner`."""
    return dict(_known(root))


@functools.cache  # a schema is what its classes are, and one load asks for each of its settings
def _known(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return dict(_sections(root, ""))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        if is_section(info):
            inner = typing.cast("type[BaseModel]", info.annotation)
            yield prefix + name, inner
            yield from _sections(inner, f"{prefix}{name}.")


def is_section(info: FieldInfo) -> bool:
    """True if a name is a section of the schema and not a setting."""
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def fields(root: type[BaseModel] = Recipe) -> Iterator[Field]:
    """Names of all settings of the schema, section by section."""
    for section, model in sections(root).items():
        for name, info in model.model_fields.items():
            if not is_section(info):
                yield Field(f"{section}.{name}", info)


def find(path: str, root: type[BaseModel] = Recipe) -> Field | None:
    """Find a setting by its name `section.field` in the schema, or None."""
    section, _, name = path.rpartition(".")
    model = _known(root).get(section)
    info = model.model_fields.get(name) if model is not None else None
    return None if info is None or is_section(info) else Field(path, info)


def from_environment(path: str) -> str:
    """The setting's name that an environment variable means, whose name has no dot inside of a section's name.

    Example:
        >>> from_environment("precision.controller_budget"), from_environment("train.steps")
        ('precision.controller.budget', 'train.steps')
    """
    for section in sections():
        before, dot, inner = section.rpartition(".")
        if dot and path.startswith(f"{before}.{inner}_"):
            return f"{section}.{path.removeprefix(f'{before}.{inner}_')}"
    return path


def nested(values: Mapping[str, object]) -> dict[str, typing.Any]:
    """Values by settings' names (`section.field`) as a tree of sections."""
    found: dict[str, typing.Any] = {}
    for path, value in values.items():
        *above, name = path.split(".")
        inner = found
        for section in above:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found


def flat(tree: Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """A dumped recipe's values by settings' names (`section.field`), section by section."""
    return {item.path: value_at(tree, item.path) for item in fields()}


def value_at(tree: Mapping[str, typing.Any], path: str) -> typing.Any:
    """A dumped recipe's value at a setting's name (`section.field`)."""
    found: typing.Any = tree
    for name in path.split("."):
        found = found[name]
    return found


def changes_numbers(path: str) -> bool:
    """True if a setting of this name decides the numbers that a step computes; its section says so.

    Example:
        >>> changes_numbers("train.dpo_beta"), changes_numbers("train.log_interval")
        (True, False)
    """
    section, _, name = path.rpartition(".")
    model = typing.cast("type[Section]", sections()[section])
    return name in model.changes_numbers or (model.changes_numbers == EVERY and name not in model.keeps_numbers)


def spelled(path: str, root: type[BaseModel] = Recipe) -> str:
    """The setting that a name means which has underscores or hyphens for dots, or an empty text.

    Example:
        >>> spelled("precision_controller_enabled"), spelled("rank")
        ('precision.controller.enabled', '')
    """
    wanted = re.sub(r"[.\-]", "_", path[:_COMPARED])
    return next((field.path for field in fields(root) if field.path.replace(".", "_") == wanted), "")


def suggest(path: str, root: type[BaseModel] = Recipe) -> str:
    """The nearest known name to a mistyped `section.field` (or bare `field`), or an empty text.

    The same name with other signs between its words comes first, then a field of the same name in another section, then
    near spellings in the same section, then near spellings anywhere.

    Example:
        >>> suggest("train.stesp"), suggest("train.lr"), suggest("steps"), suggest("train.lrr"), suggest("xyz.abc")
        ('train.steps', 'optim.lr', 'train.steps', 'optim.lr', '')
        >>> suggest("lora_rank"), suggest("train-global-batch-size"), suggest("parallel.cp")
        ('lora.rank', 'train.global_batch_size', '')
    """
    path = path[:_COMPARED]
    known = [field.path for field in fields(root)]
    if same := spelled(path, root):
        return same
    section, _, name = path.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if same_name:
        return difflib.get_close_matches(path, same_name, n=1, cutoff=0.0)[0]
    inside = {other.rpartition(".")[2]: other for other in known if other.startswith(section + ".")}
    anywhere = {other.rpartition(".")[2]: other for other in known} | {name: name for name in sections(root)}
    for names, cutoff in ((inside, 0.6), (anywhere, 0.75)):
        near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        if near:
            return names[near[0]]
    if section in sections(root):  # whose name alone makes paths alike
        return ""
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.7)
    return near[0] if near else ""


def json_schema() -> dict[str, typing.Any]:
    """JSON schema of settings' names in a recipe file, for editors: the sections plus `extends`."""
    schema = Recipe.model_json_schema()
    schema["title"] = "tilewright recipe"
    schema["properties"] = {
        EXTENDS: {"type": "string", "description": "Recipe whose settings are the defaults of this one."},
        **schema["properties"],
    }
    return _null_as_none(schema)


def _null_as_none(node: typing.Any) -> typing.Any:
    if isinstance(node, dict):
        if node.get("type") == "null":
            return {"const": NONE}
        return {key: _null_as_none(value) for key, value in node.items() if not (key == "default" and value is None)}
    if isinstance(node, list):
        return [_null_as_none(item) for item in node]
    return node


def _without_none(annotation: object) -> object:
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return parts[0] if is_union and len(parts) == 1 else annotation


def _describe(annotation: object) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text in quotes"}
    if annotation in words:
        return words[typing.cast(type, annotation)]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(args[0]) + _bounds([item for info in args[1:] for item in info.metadata])
    if origin is typing.Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in args)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(f'"{NONE}"' if part is type(None) else _describe(part) for part in args)
    # Tuples and tables, the special ones first: a list of rules is a list of texts to the last line.
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)} numbers"
    if origin is tuple and args[0] is PrecisionRule:
        return 'a list of rules like [{ match = "*.o_proj", op = "linear", compute = "fp32" }]'
    if origin is tuple and args[0] is LayerSection:
        return "a list of tables like [{ repeat = 3, num_heads = 4, ffn_dim = 512 }, { num_heads = 0 }]"
    if origin is tuple and args[0] is MixingStage:
        return "a list of stages like [{ at = 0.5, weights = { code = 1.0, docs = 2.0 } }]"
    if origin is tuple and typing.get_origin(args[0]) is typing.Literal:
        return f"a list with any of {_describe(args[0]).removeprefix('one of ')}"
    if origin is tuple and _describe(args[0]).startswith(("a number", "an integer")):
        return f"a list of numbers, each {_describe(args[0])}"
    if origin is tuple:
        return 'a list of texts like ["a", "b"]'
    if origin is dict and args[1] is str:
        return 'a table of texts like { one = "a", two = "b" }'
    if origin is dict and int in typing.get_args(args[1]):
        return "a table of whole numbers like { 2 = 5, 5 = 11 }"
    if origin is dict and typing.get_origin(args[1]) is dict:
        return "a table of tables like { one = { limit = 4 } }"
    if origin is dict:
        return "a table of numbers like { code = 1.0, prose = 0.5 }"
    raise AssertionError(f"setting_names has no words for {annotation}")


def _bounds(metadata: Iterable[object]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    present = [(text, getattr(item, key)) for item in metadata for key, text in words.items() if hasattr(item, key)]
    found = [f"{text} {_number(value)}" for text, value in present]
    return "".join(f", {text}" for text in found)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
