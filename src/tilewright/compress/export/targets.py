"""All export targets, in the order in which they are written and shown."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tilewright.compress.export import aoti, executorch, gguf, hf_folder, onnx, openvino
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.target import Target, missing
from tilewright.core.errors import ConfigError

TARGETS: tuple[Target, ...] = (
    *(hf_folder.HF, hf_folder.FP8, gguf.F16, gguf.Q8_0, gguf.Q4_0),
    *(onnx.ONNX, onnx.ONNX_INT8, onnx.ONNX_QDQ, openvino.OPENVINO, executorch.EXECUTORCH, aoti.AOTI),
)

PREFERRED = {
    "training": ("fp8", "hf"),
    "serving": ("onnx-int8", "openvino-int8", "gguf-q8_0", "onnx"),
    "edge": ("executorch-8da4w", "gguf-q4_0"),
}
"""By use, the targets of a command without `--to`: the first that is there and can hold the model."""


def find_targets(names: str, where: str = "--to", short: Mapping[str, str] = MappingProxyType({})) -> list[Target]:
    """Find export targets by a comma-separated list, each once, in our order.

    Args:
        names: the list.
        where: the option that has it.
        short: other names of targets on that command line.

    Raises:
        ConfigError: a name is no target.

    Example:
        >>> [target.name for target in find_targets("gguf-q8_0, hf, int8", short={"int8": "onnx-int8"})]
        ['hf', 'gguf-q8_0', 'onnx-int8']
    """
    known = {**short, **{target.name: target.name for target in TARGETS}}
    asked = chosen(names, list(known), what="No such export target", try_=f"{where} hf,gguf-q8_0", where=where)
    wanted = {known[name] for name in asked}
    return [target for target in TARGETS if target.name in wanted]


def chosen(text: str, known: Sequence[str], *, what: str, try_: str, where: str) -> list[str]:
    """Names of a comma-separated list, such as of targets, each known and each once, in the order of `known`.

    Raises:
        ConfigError: a name is not known, or there is none.

    Example:
        >>> chosen("b, a", ("a", "b", "c"), what="No such letter", try_="--letters a", where="--letters")
        ['a', 'b']
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise ConfigError(
            what,
            got=", ".join(unknown) or "an empty list",
            need="one or more of " + ", ".join(known),
            try_=try_,
            where=where,
        )
    return [name for name in known if name in asked]


def default_targets(source: ExportSource) -> list[Target]:
    """The default export targets, one for each use: training in 8 bits, serving in INT8, 4 bits for the edge."""
    by_name = {target.name: target for target in TARGETS}
    chosen = []
    for names in PREFERRED.values():
        there = [by_name[name] for name in names if name in by_name]
        chosen += [target for target in there if why_not(target, source) is None][:1] or there[:1]
    return chosen


def why_not(target: Target, source: ExportSource) -> str | None:
    """Explain why an export target cannot be written here: a package is missing, or the format cannot hold the
    model."""
    if source.reads_images and not target.images:
        return f"{target.name} is written of models that read text, not images"
    return missing(target.packages, target.extra) or target.why_not(source)
