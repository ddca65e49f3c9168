"""What a foreign language model does with positions and masks, found out by running it on eight tokens.

Hugging Face models differ in what they accept and, worse, in what they silently ignore. Instead of a table of
architectures, a few tiny forward passes compare outputs: rows that differ only in another document must agree
in this one. Called once by `hf.HFModel`, before its first loss.

Legend: B rows  S positions  V vocabulary.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

_LENGTH, _FIRST = 8, 4
"""Probe rows: eight tokens, of which the first four are a document of their own where rows are packed."""
_LEAK = 1e-3
"""Influence below this share of the unmasked influence is rounding."""


@dataclass(frozen=True)
class InputStyle:
    """How to call a model so that documents in one row do not see each other.

    Args:
        positions: pass `position_ids` that restart in every document.
        mask: "positions": the model separates documents by their restarting positions; "blocks": it takes a
            [B, 1, S, S] mask; "none": it cannot separate them.
        causal: whether a token sees only tokens before it.
        plain_head: hidden states of the base model times the output embedding's weight are exactly its logits.
    """

    positions: bool
    mask: Literal["positions", "blocks", "none"]
    causal: bool
    plain_head: bool


def block_mask(segments_BS: Tensor, causal: bool, additive: torch.dtype | None) -> Tensor:
    """[B, 1, S, S]: query row may look at key column. Boolean, or 0 / most negative number of `additive`."""
    allowed_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    if causal:
        allowed_BSS = allowed_BSS.tril()
    if additive is None:
        return allowed_BSS[:, None]
    floor = torch.finfo(additive).min
    return torch.zeros_like(allowed_BSS, dtype=additive).masked_fill_(~allowed_BSS, floor)[:, None]


def call_arguments(
    net: nn.Module, style: InputStyle, positions_BS: Tensor | None, segments_BS: Tensor | None
) -> dict[str, Any]:
    """Keyword arguments besides `input_ids` for a forward pass over (packed) rows."""
    arguments: dict[str, Any] = {"use_cache": False} if accepts(net, "use_cache") else {}
    if style.positions and positions_BS is not None:
        arguments["position_ids"] = positions_BS
    if segments_BS is not None and style.mask == "blocks":
        additive = None if net.config._attn_implementation == "sdpa" else net.dtype
        arguments["attention_mask"] = block_mask(segments_BS, style.causal, additive)
    return arguments


def accepts(net: nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return argument in inspect.signature(net.forward).parameters


@torch.no_grad()
def probe_language_model(net: nn.Module, vocab_size: int) -> InputStyle:
    """Run the model a few times on two rows of eight tokens. Leaves weights, mode and random state alone."""
    device = next(net.parameters()).device
    ids_S = torch.arange(_LENGTH, device=device) * 3 % vocab_size
    other_S = (ids_S + vocab_size // 2) % vocab_size
    first_S = torch.arange(_LENGTH, device=device) < _FIRST
    rows_BS = torch.stack((ids_S, torch.where(first_S, other_S, ids_S)))
    plain = InputStyle(positions=False, mask="none", causal=True, plain_head=False)
    with _evaluation(net):

        def run(style: InputStyle, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
            return net(input_ids=rows_BS, **call_arguments(net, style, positions, segments)).logits.float()

        logits = run(plain)
        counting_BS = torch.arange(_LENGTH, device=device).expand(2, -1)
        positions = accepts(net, "position_ids") and _same(
            logits, run(InputStyle(True, "none", True, False), counting_BS)
        )
        causal = _is_causal(net, ids_S, other_S, plain)
        restart_BS = torch.where(first_S, counting_BS, counting_BS - _FIRST)
        segments_BS = (~first_S).int().expand(2, -1)
        free = _influence(logits)
        mask: Literal["positions", "blocks", "none"] = "none"
        for candidate in ("positions", "blocks"):
            style = InputStyle(positions, candidate, causal, False)
            if (candidate == "positions" and not positions) or not accepts(net, "attention_mask"):
                continue
            if _influence(run(style, restart_BS, segments_BS)) <= _LEAK * free:
                mask = candidate
                break
        return InputStyle(positions, mask, causal, causal and _has_plain_head(net, rows_BS, logits))


def _influence(logits_BSV: Tensor) -> float:
    """How much the first document changes the second: the largest difference of the two rows' logits there."""
    second = logits_BSV[:, _FIRST:]
    return float((second[0] - second[1]).abs().max())


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _LEAK * a.abs().max())


def _is_causal(net: nn.Module, ids_S: Tensor, other_S: Tensor, plain: InputStyle) -> bool:
    """Whether the last token changes nothing before it."""
    last_S = torch.arange(_LENGTH, device=ids_S.device) == _LENGTH - 1
    rows_BS = torch.stack((ids_S, torch.where(last_S, other_S, ids_S)))
    logits = net(input_ids=rows_BS, **call_arguments(net, plain, None, None)).logits.float()
    change_S = (logits[0] - logits[1]).abs().amax(-1)
    return bool(change_S[:-1].max() <= _LEAK * change_S[-1])


def _has_plain_head(net: nn.Module, rows_BS: Tensor, logits_BSV: Tensor) -> bool:
    """Bitwise, so that a soft cap or a scale close to 1 shows."""
    head = net.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or net.base_model is net:
        return False
    arguments = {"use_cache": False} if accepts(net.base_model, "use_cache") else {}
    out = net.base_model(input_ids=rows_BS, **arguments)
    hidden = getattr(out, "last_hidden_state", None)
    return hidden is not None and torch.equal(head(hidden).float(), logits_BSV)


@contextmanager
def _evaluation(net: nn.Module) -> Iterator[None]:
    was_training = net.training
    net.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        net.train(was_training)
