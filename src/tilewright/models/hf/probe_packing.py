"""How a Hugging Face language model must be called so that packed documents do not see each other.

Hugging Face models differ in what they accept and, worse, in what they silently ignore. Instead of a table of
architectures, a few forward passes over eight tokens compare outputs: rows that differ only in another document must
agree in this one. Called once by `model.HFModel`, before its first loss; `packing` then makes the calls.

Legend: B rows  S positions  V vocabulary.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.models.base.eval_mode import eager, evaluation
from tilewright.models.hf.packing import forward_arguments

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

_LENGTH, _FIRST = 8, 4
"""Probe rows: eight tokens, of which the first four are a document of their own where rows are packed."""
_LEAK = 1e-3
"""Influence below this share of the unmasked influence is rounding."""
REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)
"""How models refuse arguments that they do not take, each in its own way."""

Documents = Literal["positions", "blocks", "rows"]
_PACKED: tuple[Documents, ...] = ("positions", "blocks")


@dataclass(frozen=True)
class InputStyle:
    """How to call a Hugging Face language model so that packed documents do not see each other.

    Args:
        documents: how documents of a packed row are kept apart. "positions": the model does it where `position_ids`
            restart; "blocks": it takes a [B, 1, S, S] mask; "rows": each document becomes a row of its own.
        causal: whether a token sees only tokens before it.
        plain_head: hidden states of the base model times the output embedding's weight are exactly its logits.
        exact: documents are apart. False only for bidirectional models that ignore a padding mask.
    """

    documents: Documents
    causal: bool
    plain_head: bool
    exact: bool = True


def check_taught(net: "PreTrainedModel", style: InputStyle, *, packed: bool) -> None:
    """Raise ConfigError if a model cannot learn from a teacher, or be one: both are compared position by position, on
    logits that are computed by chunks."""
    if style.plain_head and not (packed and style.documents == "rows"):
        return
    reason = "takes no document masks, so packed rows are cut" if style.plain_head else "makes whole logits itself"
    raise ConfigError(
        "Model cannot take part in distillation",
        got=f"{type(net).__name__}, which {reason}",
        need="a head that is one matmul, and packed rows in place",
        try_='distill.teacher = "", or a model of the Llama or Qwen kind',
        where="distill.teacher",
    )


def short_images(config: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two images to probe with, as small as a network takes them, and their classes."""
    size = getattr(config, "image_size", 64)  # a network of convolutions takes any
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.linspace(-1, 1, 2 * config.num_channels * height * width, device=device, dtype=dtype)
    shape = (2, config.num_channels, height, width)
    return {"pixel_values": pixels.view(shape), "labels": torch.tensor([0, 1], device=device)}


def short_texts(vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Two rows of eight tokens to probe with, and their labels."""
    ids_S = torch.arange(8, device=device) * 3 % vocab_size
    ids_BS = torch.stack((ids_S, ids_S.flip(0)))
    return {"input_ids": ids_BS, "labels": ids_BS.roll(1, dims=1)}


@torch.no_grad()
def probe_language_model(net: "PreTrainedModel", vocab_size: int) -> InputStyle:
    """Find how a language model must be called: run it a few times on two rows of eight tokens. It stays as it is."""
    probe = _Probe(net, vocab_size)
    with evaluation(net), eager():
        causal = probe.is_causal()
        documents: Documents = "rows"
        if probe.takes_positions():
            for packed in _PACKED[:1] if has_window(net) else _PACKED:
                if probe.separates(packed, causal):
                    documents = packed
                    break
        plain_head = causal and probe.has_plain_head(documents)
        exact = causal or documents != "rows" or probe.ignores_padding()
    return InputStyle(documents, causal, plain_head, exact)


def has_window(net: "PreTrainedModel") -> bool:
    """True if some layer attends within a window, which our own mask would replace."""
    config = net.config.get_text_config().to_dict()
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    return bool(kinds) or any(value for key, value in config.items() if "window" in key or "local_attention" in key)


class _Probe:
    """Two rows that differ in one place, and what that changes elsewhere."""

    def __init__(self, net: "PreTrainedModel", vocab_size: int):
        self.net = net
        device = next(net.parameters()).device
        self.counting_S = torch.arange(_LENGTH, device=device)
        self.first_S = self.counting_S < _FIRST
        self.ids_S = self.counting_S * 3 % vocab_size
        self.other_S = (self.ids_S + vocab_size // 2) % vocab_size
        self.rows_BS = self._differ_at(self.first_S)
        self.positions_BS = torch.where(self.first_S, self.counting_S, self.counting_S - _FIRST).expand(2, -1)
        self.segments_BS = (~self.first_S).int().expand(2, -1)

    def _differ_at(self, where_S: Tensor) -> Tensor:
        return torch.stack((self.ids_S, torch.where(where_S, self.other_S, self.ids_S)))

    def _run(self, rows_BS: Tensor, **arguments: Any) -> Tensor:
        arguments = forward_arguments(self.net) | arguments
        return self.net(input_ids=rows_BS, **arguments).logits.float()

    def _packed(self, documents: Documents, causal: bool) -> dict[str, Any]:
        return forward_arguments(self.net, documents, causal, self.positions_BS, self.segments_BS)

    def is_causal(self) -> bool:
        """Probe if the last token changes nothing before it: the model is causal."""
        logits = self._run(self._differ_at(self.counting_S == _LENGTH - 1))
        change_S = (logits[0] - logits[1]).abs().amax(-1)
        return bool(change_S[:-1].max() <= _LEAK * change_S[-1])

    def takes_positions(self) -> bool:
        """Probe if the model counts positions from 0 when it gets no `position_ids`."""
        if "position_ids" not in inspect.signature(self.net.forward).parameters:
            return False
        plain = self._run(self.rows_BS)
        try:
            given = self._run(self.rows_BS, position_ids=self.counting_S.expand(2, -1))
        except REFUSALS:
            return False
        return bool((plain - given).abs().max() <= _LEAK * plain.abs().max())

    def separates(self, documents: Documents, causal: bool) -> bool:
        """Probe if the first document changes nothing in the second when they are packed this way."""
        try:
            packed = self._run(self.rows_BS, **self._packed(documents, causal))
        except REFUSALS:
            return False
        return _influence(packed) <= _LEAK * _influence(self._run(self.rows_BS))

    def has_plain_head(self, documents: Documents) -> bool:
        """Probe of a plain head. Bitwise, so that a soft cap or a scale close to 1 shows."""
        head = self.net.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None or self.net.base_model is self.net:
            return False
        arguments = forward_arguments(self.net) if documents == "rows" else self._packed(documents, causal=True)
        try:
            out = self.net.base_model(input_ids=self.rows_BS, **arguments)
        except REFUSALS:
            return False
        hidden = getattr(out, "last_hidden_state", None)
        return hidden is not None and torch.equal(head(hidden).float(), self._run(self.rows_BS, **arguments))

    def ignores_padding(self) -> bool:
        """Probe if masked padding after a row changes nothing in it."""
        mask_BS = self.first_S.long().expand(2, -1)
        alone = self._run(self.rows_BS[:, :_FIRST])
        try:
            padded = self._run(self.rows_BS, attention_mask=mask_BS)[:, :_FIRST]
        except REFUSALS:
            return False
        return bool((alone - padded).abs().max() <= _LEAK * alone.abs().max())


def _influence(logits_BSV: Tensor) -> float:
    """How much the probe's first document changes the second: the largest difference of the two rows' logits there."""
    second = logits_BSV[:, _FIRST:]
    return float((second[0] - second[1]).abs().max())
