"""`[data.mixing]`: weights of domains that move during a run. `[data.streaming]`: built datasets at addresses, read in
shards during a run."""

from typing import Literal

from pydantic import Field

from tilewright.core.config.section import EVERY, Bytes, Count, Section

MixPolicyName = Literal["off", "static", "temperature", "schedule", "ppl_guard", "exp3", "aioli"]


class MixingStage(Section):
    """Weights from a share of the run's steps on."""

    at: float = Field(ge=0, le=1)
    """Share of the steps from which on they hold."""
    weights: dict[str, float]
    """By domain. One that is not named gets nothing."""


class MixingSection(Section):
    changes_numbers = EVERY

    policy: MixPolicyName = "off"
    """How weights move. `static`: never; losses by domain are measured all the same. `temperature`: tokens of a
    domain to the power of 1 / `temperature`. `schedule`: by the share of steps that is done. `ppl_guard`: a domain
    whose held-out loss rises above its noise gets more, unless it is overfitted. `exp3`: by training loss, as ODM does.
    `aioli`: by what each domain does to the held-out losses of all, found by trying."""
    interval: Count = Field(default=50, ge=1)
    """Steps between evaluations that the policy is shown, apart from `train.eval_interval`."""
    eval_batches: Count = Field(default=1, ge=1)
    """Held-out batches of each domain in such an evaluation. Each evaluation takes the next ones, and after the last
    batch the first ones again; with `aioli` each round does."""
    lowest: float = Field(default=0.0, ge=0, le=1)
    """Smallest share of a domain."""
    highest: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a domain."""
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the old weights that each move keeps; the rest of the way is gone at the evaluations after it."""
    max_epochs: float = Field(default=0.0, ge=0, le=1e6)
    """Times that the rows of a domain are trained on at most, to within one interval; then it gets nothing. Where that
    is all domains, all continue. 0: no limit."""
    temperature: float = Field(default=2.0, ge=1, le=1e6)
    """temperature: 1 is in proportion to tokens, a large one is even."""
    schedule: tuple[MixingStage, ...] = ()
    """schedule: stages, ascending."""
    boost: float = Field(default=1.15, gt=1, le=10)
    """ppl_guard: factor of a weight at a rise."""
    patience: Count = Field(default=3, ge=2, le=64)
    """ppl_guard: evaluations in a row that a rise is seen in."""
    noise: float = Field(default=3.5, gt=0, le=100)
    """ppl_guard: standard deviations of the measured noise that a rise is above."""
    cooldown: Count = Field(default=5, ge=0)
    """ppl_guard: evaluations after a move of a domain in which its rises do not count."""
    max_ratio: float = Field(default=2.0, ge=1, le=1e6)
    """ppl_guard: largest ratio of a weight to that of `data.weights`."""
    calm: Count = Field(default=20, ge=1)
    """ppl_guard: evaluations without a rise after which one `boost` is taken back."""
    keep: float = Field(default=0.9, ge=0, lt=1)
    """exp3: share of a reward's moving average that is kept."""
    probe: float = Field(default=0.75, gt=0, lt=1)
    """aioli: weight of the domain that is tried; the others share the rest."""
    hold: Count = Field(default=8, ge=1)
    """aioli: evaluations of a round after its probes."""
    rate: float = Field(default=0.2, gt=0, le=100)
    """aioli: size of the update after a round."""


class StreamingSection(Section):
    changes_numbers = ("window",)
    keeps_numbers = ("cache_bytes", "retries", "backoff_s", "return_s")

    window: Count = Field(default=8, ge=1)
    """Shards of a domain whose rows are shuffled together. Order is a pure function of it and of `run.seed`."""
    cache_bytes: Bytes = Field(default=4 << 30, ge=1)
    """Limit of the shards that are kept in `data.cache_dir`: room for one window of each domain at least, for two and
    more to read ahead. Runs on one machine share them."""
    retries: Count = Field(default=5, ge=0)
    """Times that a read is tried again before its source counts as away."""
    backoff_s: float = Field(default=0.5, ge=0, le=3600)
    """Seconds before a read is tried again for the first time; before each next try twice as many, at most 30."""
    return_s: float = Field(default=60.0, ge=0, le=1e6)
    """Seconds after which a source that is away is tried again."""
