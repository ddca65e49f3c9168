"""How two builds differ: settings, stages, counts by domain, and reasons."""

from collections.abc import Mapping
from typing import Any

from tilewright.core.config import setting_names
from tilewright.data.engine.build_settings import DataBuild

_COUNTS = ("docs", "bytes", "tokens", "holdout_docs")


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Differences of two builds' `dataset.json`: `same` and, of settings, domains and reasons, (name, here, there)."""
    paths = [item.path for item in setting_names.fields(DataBuild)]
    settings = [_row(path, *(setting_names.value_at(one["settings"], path) for one in (here, there))) for path in paths]
    changed = [name for name, digest in here["stages"].items() if digest != there["stages"].get(name)]
    summaries = here["summary"], there["summary"]
    domains = sorted({name for one in summaries for name in one["domains"]})
    counts = [
        _row(f"{domain}: {count}", *(one["domains"].get(domain, {}).get(count, 0) for one in summaries))
        for domain in domains
        for count in _COUNTS
    ]
    reasons = sorted({name for one in summaries for name in one["refused"]})
    refused = [_row(name, *(_number(one["refused"].get(name, {})) for one in summaries)) for name in reasons]
    return {
        "same dataset": here["fingerprint"] == there["fingerprint"],
        "first stage that differs": changed[0] if changed else "none",
        "settings": [row for row in settings if row[1] != row[2]],
        "counts": [row for row in counts if row[1] != row[2]],
        "dropped": [row for row in refused if row[1] != row[2]],
    }


def _row(name: str, here: object, there: object) -> tuple[str, str, str]:
    return name, str(here), str(there)


def _number(reason: Mapping[str, Any]) -> int:
    return reason.get("documents", 0) or reason.get("files", 0)
