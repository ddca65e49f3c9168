"""Rows of docs/benchmarks.md on the server of models. See `benchmarks.claims`."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.claim_rows import Row, read
from benchmarks.common import RESULTS
from benchmarks.verdict import NOT_RUN, Verdict, once

REQUESTS = "200 requests of 8 clients answered and 50 malformed ones refused with 4xx, of 250"
MEMORY = "memory of the server after 250 requests against after 50"


def rows() -> Iterator[Row]:
    """Both; they say so where they were not run."""
    if not (RESULTS / "serve.json").exists():
        yield Row("serve requests", REQUESTS, "at least 250", Verdict("-", NOT_RUN), None, "CPU")
        yield Row("serve memory", MEMORY, "-", Verdict("-", NOT_RUN), None, "CPU")
        return
    result = read("serve")
    found = result.results
    right = found["answered"] + found["malformed"] - len(found["malformed_not_4xx"])
    text = f"{found['answered']} answered, {found['malformed'] - len(found['malformed_not_4xx'])} refused"
    yield Row("serve_requests", REQUESTS, "at least 250", once(right, text, at_least=250), result)
    yield Row("serve_memory", MEMORY, "-", _growth(found["server_mib"]), result)


def _growth(mib: Mapping[str, Any]) -> Verdict:
    growth = mib["250"] / mib["50"]
    return once(growth, f"{growth:.2f}x ({mib['50']:.0f} to {mib['250']:.0f} MiB)")
