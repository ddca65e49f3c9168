"""`[data.streaming]`: built datasets at addresses, read in shards during a run."""

from pydantic import Field

from tilewright.core.config.section import Bytes, Count, Section


class StreamingSection(Section):
    changes_numbers = ("window",)
    keeps_numbers = ("cache_bytes", "retries", "backoff_s", "return_s")

    window: Count = Field(default=8, ge=1)
    """Shards of a domain whose rows are shuffled together. Order is a pure function of it and of `run.seed`."""
    cache_bytes: Bytes = Field(default=4 << 30, ge=1)
    """Of shards that are kept in `data.cache_dir`, at most: one window of each domain at least, two and more to read
    ahead. Runs on one machine share them."""
    retries: Count = Field(default=5, ge=0)
    """Times that a read is tried again before its source counts as away."""
    backoff_s: float = Field(default=0.5, ge=0, le=3600)
    """Seconds before the first of them; before each next one twice as many, at most 30."""
    return_s: float = Field(default=60.0, ge=0, le=1e6)
    """Seconds after which a source that is away is tried again."""
