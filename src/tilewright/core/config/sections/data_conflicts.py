"""Contradictions in the settings that describe a run's data: domains and weights, conversations, what is a row."""

from collections.abc import Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe


def _data(recipe: Recipe) -> Iterator[Conflict]:
    data = recipe.data
    if recipe.model.task == "image_classification" and data.source == "installed" and not data.sources:
        yield Conflict(
            ("model.task", "data.source"),
            "Installed corpus holds no images",
            'data.source = "installed", model.task = "image_classification"',
            "a folder with one sub-folder of images a class",
            "--data.source FOLDER",
        )
    if any(not 0 <= weight < float("inf") for weight in data.weights.values()) or (
        data.weights and not sum(data.weights.values())
    ):
        yield Conflict(
            ("data.weights",),
            "Mixture weights must be 0 or more, and not all 0",
            f"data.weights = {data.weights}",
            "numbers from 0 up, at least one above 0",
            "leave a domain out with data.domains instead of a negative weight",
        )
    if data.format != "text":
        yield from _chat(recipe)
    if data.rows == "documents":
        yield from _documents(recipe)
    # Only names that the recipe lists: those of a folder are checked where it is read.
    known = data.domains or tuple(data.sources)
    strangers = sorted(set(data.weights) - set(known)) if known else []
    if strangers:
        yield Conflict(
            ("data.weights", "data.domains", "data.sources"),
            "Weights for domains that data.domains leaves out" if data.domains else "Weights for unknown sources",
            ", ".join(strangers),
            f"domains among {', '.join(known)}",
            f"add them to data.{'domains' if data.domains else 'sources'} or take their weights away",
        )


def _documents(recipe: Recipe) -> Iterator[Conflict]:
    """Find whole documents asked of data that cannot be concatenated: rows that are not text, and pairs of answers."""
    if recipe.model.task == "image_classification":
        yield Conflict(
            ("data.rows", "model.task"),
            "Images are no documents",
            'data.rows = "documents", model.task = "image_classification"',
            "text",
            'data.rows = "packed"',
        )
    if recipe.data.format == "preferences":
        yield Conflict(
            ("data.rows", "data.format"),
            "Pairs of preferences cannot be put behind each other",
            'data.rows = "documents", data.format = "preferences"',
            "two answers side by side, each in a row of its own",
            'data.rows = "packed", or data.format = "chat"',
        )


def _chat(recipe: Recipe) -> Iterator[Conflict]:
    """Find settings of chat data that contradict each other: conversations need an answer to predict, and no installed
    file has any."""
    data = recipe.data
    if recipe.model.task != "causal_lm":
        yield Conflict(
            ("model.task", "data.format"),
            f'data.format = "{data.format}" needs a causal language model',
            f'model.task = "{recipe.model.task}"',
            'model.task = "causal_lm"',
            'model.task = "causal_lm", or data.format = "text"',
        )
    if data.source == "installed" and not data.sources:
        yield Conflict(
            ("data.source", "data.sources", "data.format"),
            "Installed corpus holds no conversations",
            f'data.source = "installed", data.format = "{data.format}"',
            "a file or folder of conversations",
            "--data.source FILE",
        )


def _preferences(recipe: Recipe) -> Iterator[Conflict]:
    """Find settings that do not go with preference pairs, each of which is two rows."""
    if recipe.data.format != "preferences":
        return
    train = recipe.train
    if train.global_batch_size % 2 or train.micro_batch_size % 2:
        yield Conflict(
            ("data.format", "train.global_batch_size", "train.micro_batch_size"),
            "Pairs of preferences need even batch sizes",
            f"train.global_batch_size = {train.global_batch_size}, train.micro_batch_size = {train.micro_batch_size}",
            "even numbers: a pair is two rows",
            f"train.global_batch_size = {train.global_batch_size + train.global_batch_size % 2}, "
            f"train.micro_batch_size = {train.micro_batch_size + train.micro_batch_size % 2}",
        )


def _mixing(recipe: Recipe) -> Iterator[Conflict]:
    """Find faults in mixing: stages that are missing, out of order or of unknown domains, and bounds that no weights
    can keep."""
    data, mixing = recipe.data, recipe.data.mixing
    if mixing.policy == "off":
        return
    # Weights sum to 1: all lower bounds together must not pass it, all upper bounds must reach it.
    known = data.domains or tuple(data.sources)
    least, most = mixing.lowest * max(len(known), 2), mixing.highest * max(len(known), 1)
    if mixing.lowest > mixing.highest or least > 1 or (known and most < 1):
        yield Conflict(
            ("data.mixing.lowest", "data.mixing.highest"),
            "Bounds of the mixture cannot be met",
            f"lowest = {mixing.lowest:g}, highest = {mixing.highest:g}",
            "weights between them that sum to 1",
            "data.mixing.lowest = 0, data.mixing.highest = 1",
        )
    if mixing.policy != "schedule":
        return
    stages = mixing.schedule
    if not stages or [one.at for one in stages] != sorted({one.at for one in stages}):
        yield Conflict(
            ("data.mixing.schedule",),
            "Schedule of the mixture needs stages in ascending order",
            f"{len(stages)} stages, at {', '.join(f'{one.at:g}' for one in stages) or 'no share of the steps'}",
            "a stage or more, each later than the one before",
            "--data.mixing.schedule '[{at = 0.0, weights = {code = 1, docs = 1}}, {at = 0.8, weights = {docs = 1}}]'",
        )
    # A weight per domain and stage; as above, names are checked where the recipe lists them.
    for stage in stages:
        strangers = sorted(set(stage.weights) - set(known)) if known else []
        bad = any(not 0 <= weight < float("inf") for weight in stage.weights.values()) or not sum(
            stage.weights.values()
        )
        if strangers or bad:
            yield Conflict(
                ("data.mixing.schedule",),
                f"Stage at {stage.at:g} has impossible weights",
                f"no such domain: {', '.join(strangers)}" if strangers else str(stage.weights),
                f"weights of zero or more, one above zero{', of ' + ', '.join(known) if known else ''}",
                "the names that data.json of a run folder has under domains",
            )


_WITH_LOGIN = ("http", "https", "ftp", "sftp", "ssh", "smb", "webdav", "webhdfs")
"""Schemes whose addresses may begin with user:password@."""


def _addresses(recipe: Recipe) -> Iterator[Conflict]:
    """Find addresses of data that hold a password, which run.toml and the report would repeat, or that are signed, and
    so no folder's."""
    data = recipe.data
    given = {
        "data.source": [data.source],
        "data.sources": data.sources.values(),
        "data.eval_source": [data.eval_source],
    }
    for field, address in ((field, text) for field, texts in given.items() for text in texts):
        scheme, _, rest = address.partition("://")
        login, _, host = rest.partition("?")[0].partition("/")[0].rpartition("@")
        if scheme in _WITH_LOGIN and (":" in login or (scheme in ("http", "https") and "?" in rest)):
            yield Conflict(
                (field,),
                "Address with a password or a query in it",
                f"{scheme}://{'***@' * bool(login)}{host}/...{'?***' * ('?' in rest)}",
                "a folder's address, to which names of files are added; a login would stand in run.toml and the report",
                f"{scheme}://{host}/..., and fsspec's arguments as JSON in the environment: FSSPEC_{scheme.upper()}",
            )


DATA_CHECKS = (_data, _addresses, _preferences, _mixing)
