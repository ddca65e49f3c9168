"""The files that scores are learned from: which there are below each path of `[quality]`, `[noise]` and `[sample]`.

They are listed as the files of the build are, before anything is read, so that what is missing is said at once.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tilewright.core.errors import DataError, Problem
from tilewright.data.engine.build_files import Listing, list_inputs
from tilewright.data.engine.build_settings import DataBuild, ReadSection
from tilewright.data.sources.content_hash import Contents
from tilewright.data.stages.scores.score_settings import paths

_FILES = {"quality.model": "quality.safetensors of a build", "quality.labelled": "a .jsonl file"}


def list_references(build: DataBuild, domains: Iterable[str], contents: Contents | None = None) -> dict[str, Listing]:
    """List references: the content of each folder or file of text that the build learns from, by setting.

    Args:
        build: settings.
        domains: of the records, which settings may name.
        contents: of files that were read before.

    Raises:
        DataError: files and folders that are missing or empty, and domains that do not exist, all in one error.
    """
    found: dict[str, Listing] = {}
    problems = []
    # Every setting is checked before the error: one run lists all paths to mend.
    for setting, path in paths(build.quality, build.noise, build.sample).items():
        problem = None
        if not Path(path).exists():
            problem = Problem("Reference of a data build does not exist", path, "a file or folder of text", "", setting)
        # Single files of a kind of their own; all others are read as any source is.
        elif setting in _FILES:
            if not Path(path).is_file():
                problem = Problem("Reference of a data build is not a file", path, _FILES[setting], "", setting)
        else:
            try:
                read = ReadSection(source=path, shard_bytes=build.read.shard_bytes, suffixes=build.read.suffixes)
                found[setting] = list_inputs(read, contents=contents)
            except DataError as error:
                got = f"{path}: {error.problems[0].got}"
                problem = Problem("Reference of a data build is empty", got, "files with text", "", setting)
        problems += [problem] if problem else []
    # Domains exist only after the listing, which is why the schema did not check them.
    known = sorted(set(domains))
    for setting, names in _named(build).items():
        unknown = sorted(set(names) - set(known))
        if unknown:
            need = "some of: " + ", ".join(known)
            problems.append(Problem("Unknown data domain", ", ".join(unknown), need, "", setting))
    if problems:
        raise DataError.from_problems(problems)
    return found


def _named(build: DataBuild) -> Mapping[str, Iterable[str]]:
    sections = (("quality", build.quality), ("noise", build.noise), ("sample", build.sample))
    named: dict[str, Iterable[str]] = {
        f"{name}.domains": section.domains for name, section in sections if section.is_on
    }
    return named | ({"sample.domain_weights": build.sample.domain_weights} if build.sample.is_on else {})
