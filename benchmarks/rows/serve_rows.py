"""Rows of docs/benchmarks.md on the server of models. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read, read_all
from benchmarks.rows.verdict import NOT_RUN, Verdict, once, turns

REQUESTS = "200 requests of 8 clients answered and 50 malformed ones refused with 4xx, of 250"
TOGETHER = "tokens per processor second of 8 clients side by side against one, 150 million parameters in FP32"
WEIGHTS = (
    "speed at which a cached token of 150 million parameters in BF16 reads its weights, over that of a sum of them"
)
MEMORY = "memory of the server after 250 requests against after 50"


def rows() -> Iterator[Row]:
    """All; they say so where they were not run."""
    for result in read_all("serve_batch"):
        found = result.results["eight_tokens_per_processor_s_of_one"]
        text = f"{found['median']:.2f}x ({found['min']:.2f} to {found['max']:.2f})"
        yield Row("serve_batch", TOGETHER, "at least 3", once(found["median"], text, at_least=3), result)
    yield from _weights()
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


def _weights() -> Iterator[Row]:
    results = list(read_all("row_linear"))
    for result in results:
        shares = result.results["bfloat16 token"]["rows_share_of_sum"]["samples"]
        yield Row(result.name, WEIGHTS, "at least 0.5", turns(shares, "{:.2f}".format, at_least=0.5), result)
    if not results:
        yield Row("row_linear", WEIGHTS, "at least 0.5", Verdict("-", NOT_RUN), None, "CPU")


def _growth(mib: Mapping[str, Any]) -> Verdict:
    growth = mib["250"] / mib["50"]
    return once(growth, f"{growth:.2f}x ({mib['50']:.0f} to {mib['250']:.0f} MiB)")
