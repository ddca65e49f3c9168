"""`[distill]`: a teacher beside the run."""

from typing import Annotated, Literal

from pydantic import Field

from tilewright.core.config.section import EVERY, Count, MadePath, Place, Section


class DistillSection(Section):
    """The recipe's `[distill]`: a teacher that the run learns from too. See `tilewright.models.distill.loss`."""

    changes_numbers = EVERY

    teacher: Annotated[str, Place(run=True)] = ""
    """A run folder or its name below `runs` (its newest checkpoint), or a folder of a Hugging Face model with the
    same tokenizer. Empty: none. It stays on the device beside the model, whole on each process or in as many stages
    (`parallel.pp`), and each step runs it forward once."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Both distributions are compared at this temperature; the divergence counts its square."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Share of the teacher in the loss: (1 - weight) cross-entropy + weight divergence. 1: the teacher alone."""
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "forward_kl"
    """Divergence of the two distributions. `forward_kl`: the student covers all that its teacher finds likely;
    `reverse_kl`: it stays where the teacher is; `jensen_shannon`: the mean of both against their middle."""
    cache: MadePath = ""
    """Folder that keeps some tokens of the teacher for each row of data, at most 200 bytes per token. A row that is
    there costs no forward pass of the teacher, in whatever order or run it comes. Empty: none, and whole distributions
    are compared."""
    cache_top_k: Count = Field(default=32, ge=1, le=256)
    """Tokens that are kept of each position. With `forward_kl` they are drawn such that loss and gradient are those of
    whole distributions on average; else they are the likeliest, and all others count as one. See
    `tilewright.models.distill.kept_tokens`."""
    hidden: dict[str, Annotated[int, Field(ge=0)]] = Field(default={})
    """Layers that learn what layers of the teacher give out, as `{ 2 = 5, 5 = 11 }`: the run's layer, then the
    teacher's, both counted from 0. Empty: none. See `tilewright.models.distill.hidden`."""
    attention: dict[str, Annotated[int, Field(ge=0)]] = Field(default={})
    """Layers whose attention learns what the attention of layers of the teacher gives out, before it is added to the
    residual stream, in the same way. Empty: none."""
    hidden_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the loss of the pairs of `hidden`, which is added: squared distance over the teacher's squared length,
    the mean of all pairs."""
    attention_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the loss of the pairs of `attention`, which is added in the same way."""
    hidden_projection: Literal["learned", "none"] = "learned"
    """`learned`: a matrix of each pair, of `hidden` and of `attention`, brings the run's values to the teacher's width;
    it is in checkpoints and in no exported folder. `none`: values are compared as they are; both widths must be the
    same."""
