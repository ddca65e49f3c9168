"""Text continuation by sampling, for the report's samples, `tilewright generate`, `chat` and `serve`.

A model keeps what it needs of earlier tokens in its key/value cache (`protocols.KeyValueCache`), so a new token runs
alone. A model that cannot runs the whole row for each token, and says so in its `notes`.

Legend: B rows  S positions.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from tilewright.models.base.eval_mode import eager, evaluation
from tilewright.models.base.protocols import Model
from tilewright.models.sampling import Sampling


def generate(
    model: Model,
    input_ids_BS: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue rows of token ids.

    Args:
        model: a causal language model, on the device of `input_ids_BS`.
        input_ids_BS: [B, S] int64 with S >= 1, no padding.
        num_tokens: at most this many new tokens.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: draw among the k most likely tokens. 0: among all.
        top_p: of these draw among the fewest whose probabilities sum to at least this. 1: among all.
        eos_id: one or several; a row that has drawn one is filled up with the first; all rows done ends early.
        generator: a CPU generator; the same seed gives the same tokens.
        use_cache: False runs the whole rows for each token.

    Returns:
        [B, S + new] int64.

    Raises:
        ValueError: no prompt token, or a negative temperature, top_k or num_tokens, or a top_p outside of 0 to 1.
    """
    _check(input_ids_BS, num_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    ends = torch.tensor([eos_id] if isinstance(eos_id, int) else list(eos_id or ()), device=input_ids_BS.device)
    done_B = torch.zeros(len(input_ids_BS), dtype=torch.bool, device=input_ids_BS.device)
    columns = [input_ids_BS]
    with inference(model):
        steps = _Steps(model, input_ids_BS, num_tokens, use_cache)
        for _ in range(num_tokens):
            next_B = sampling.draw(steps.logits(), generator).to(input_ids_BS.device)
            if len(ends):
                next_B = torch.where(done_B, ends[0], next_B)
                done_B |= torch.isin(next_B, ends)
            columns.append(next_B[:, None])
            if len(ends) and bool(done_B.all()):
                break
            steps.append(next_B)
    return torch.cat(columns, dim=1)


def stream(
    model: Model,
    input_ids_S: Tensor,
    num_tokens: int,
    *,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[int]:
    """Yield the new tokens of one row, each as soon as it is drawn. The model stops when the caller stops asking.

    Between two tokens the model is in the mode that it was in, and may be used by others.

    Args:
        model: a causal language model, on the device of `input_ids_S`.
        input_ids_S: [S] int64 with S >= 1.
        num_tokens: at most this many new tokens.
        sampling: how they are drawn.
        stop_ids: tokens that end the row; they are not handed out.
        seed: the same gives the same tokens; None draws anew each time.

    Raises:
        ValueError: no prompt token, or a negative num_tokens.
    """
    _check(input_ids_S[None], num_tokens)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return _stream(model, input_ids_S[None], num_tokens, sampling, frozenset(stop_ids), generator)


def _stream(
    model: Model,
    ids_1S: Tensor,
    num_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int],
    generator: torch.Generator,
) -> Iterator[int]:
    steps: _Steps | None = None
    for _ in range(num_tokens):
        with inference(model):
            if steps is None:
                steps = _Steps(model, ids_1S, num_tokens, use_cache=True)
            next_1 = sampling.draw(steps.logits(), generator)
            steps.append(next_1.to(ids_1S.device))
        if int(next_1) in stop_ids:
            return
        yield int(next_1)


def continue_rows(
    model: Model,
    prompts: Sequence[Tensor],
    num_tokens: int,
    *,
    sampling: Sampling,
    is_done: Callable[[int, list[int]], bool],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue rows of different lengths and return their new tokens. Rows are not padded: a longer row is still fed
    from its prompt while shorter ones are continued, so prompts of similar lengths belong together.

    Args:
        model: a causal language model, on the device of the prompts.
        prompts: int64, each [S] with S >= 1.
        num_tokens: at most this many new tokens per row.
        sampling: how they are drawn.
        is_done: whether a row, by its index and its new tokens so far, has ended.
        generator: a CPU generator; the same seed gives the same tokens.

    Raises:
        ValueError: no prompt token, or a negative num_tokens.
    """
    for ids_S in prompts:
        _check(ids_S[None], num_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    done = [num_tokens == 0] * len(prompts)
    first, last = min(map(len, prompts)), max(map(len, prompts))
    with inference(model):
        steps = _Steps(model, torch.stack([ids_S[:first] for ids_S in prompts]), last - first + num_tokens, True)
        for position in range(first, last + num_tokens):
            if all(done):
                break
            next_B = sampling.draw(steps.logits(), generator)
            for row, ids_S in enumerate(prompts):
                if position < len(ids_S):
                    next_B[row] = ids_S[position]
                elif not done[row]:
                    new[row].append(int(next_B[row]))
                    done[row] = len(new[row]) == num_tokens or is_done(row, new[row])
            if position + 1 < last + num_tokens:
                steps.append(next_B.to(prompts[0].device))
    return new


class _Steps:
    """The logits after a row, token by token, with a cache or without."""

    def __init__(self, model: Model, ids_BS: Tensor, num_tokens: int, use_cache: bool):
        self._model = model
        self._next_BS = ids_BS
        rows, length = ids_BS.shape
        self._cache = model.new_cache(rows, length + num_tokens) if use_cache else None

    def logits(self) -> Tensor:
        """Logits of the next token to generate, FP32 [B, V] on the CPU."""
        return self._model.next_token_logits(self._next_BS, self._cache).cpu()

    def append(self, next_B: Tensor) -> None:
        """Append a generated token to each row."""
        new_B1 = next_B[:, None]
        self._next_BS = torch.cat((self._next_BS, new_B1), dim=1) if self._cache is None else new_B1


def inference(model: Model) -> ExitStack:
    """Inside, the model generates: in evaluation mode, without gradients, nothing compiled."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(evaluation(model))
    # A compiled layer would be compiled again for every new length.
    stack.enter_context(eager())
    return stack


def _check(ids_BS: Tensor, num_tokens: int) -> None:
    if ids_BS.dim() != 2 or ids_BS.shape[1] == 0:
        raise ValueError(f"a prompt of at least one token a row is needed, got shape {tuple(ids_BS.shape)}")
    if num_tokens < 0:
        raise ValueError("temperature, top_k and num_tokens cannot be negative")
