"""Which stages decide what stays, in their order. Each reads the side table of the one before it that is on.

A stage that is off has no units, and what comes after it reads what came before it.
"""

from tilewright.data.engine.build_settings import DataBuild

_BEFORE_COPIES = ("rules", "filters", "quality", "noise")
_AFTER_COPIES = ("unique", "sample")


def before_filters(build: DataBuild) -> str:
    """The last stage in the order before the user's filters: they judge its records."""
    return _before(build, "filters")


def before_quality(build: DataBuild) -> str:
    """The last stage in the order before quality: its records are scored."""
    return _before(build, "quality")


def before_noise(build: DataBuild) -> str:
    """The last stage in the order before noise: its records are scored."""
    return _before(build, "noise")


def before_copies(build: DataBuild) -> str:
    """The last stage in the order before the search for copies, which begins with its records."""
    return _last_of(build, _BEFORE_COPIES)


def last_kept(build: DataBuild) -> str:
    """The last stage in the order that drops records; what it keeps is the dataset."""
    return _last_of(build, _AFTER_COPIES)


def encoding(build: DataBuild) -> str:
    """The stage that makes token streams of the records."""
    return "render" if build.chat.is_on else "encode"


def with_tokenizer(build: DataBuild) -> str:
    """The stage whose folder `tokenizer` becomes the dataset's."""
    return "template" if build.chat.is_on else "tokenizer"


def rejecting(build: DataBuild) -> list[str]:
    """The stages that write rejects of each shard, in their order."""
    names = ("read", "repair", *_BEFORE_COPIES, *_AFTER_COPIES, encoding(build))
    return [name for name in names if _is_on(build, name)]


def _before(build: DataBuild, name: str) -> str:
    return _last_of(build, _BEFORE_COPIES[: _BEFORE_COPIES.index(name)])


def _last_of(build: DataBuild, names: tuple[str, ...]) -> str:
    return [name for name in names if _is_on(build, name)][-1]


def _is_on(build: DataBuild, name: str) -> bool:
    """True if a stage of the order is on; most always are."""
    switches = {"quality": build.quality.is_on, "noise": build.noise.is_on, "sample": build.sample.is_on}
    switches["filters"] = build.filters.is_on
    return switches.get(name, True)
