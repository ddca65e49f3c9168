"""Our models as the harness' `LM`: log-likelihoods of answers, of whole texts, and generated text.

What is scored is what the harness' own class for Hugging Face models (`HFLM`) scores: the same split of context and
answer, cuts from the left, windows, grouping and stop texts; they are the harness' own functions where it has them.
Two cases that end `HFLM` are scored here. An answer that its context's last token swallows is encoded alone. An empty
answer has log-likelihood 0.

Legend: B requests  S positions  N scored tokens  V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.chat.template import ChatError, ChatTemplate
from tilewright.data.common.progress import ProgressBar
from tilewright.integrations.lm_eval.text_codec import TextCodec
from tilewright.models.base.eval_mode import eager, evaluation
from tilewright.models.base.protocols import Model
from tilewright.models.generate import continue_rows
from tilewright.models.sampling import Sampling

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts, or None of a window; ids of the context; ids of the answer."""
DEFAULT_NEW_TOKENS = 256
"""Where a task does not say how many (the harness' own number)."""
_SPREAD = 64
"""Most tokens by which prompts that run together differ in length."""
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
"""Arguments of generation without effect at these values."""


class TilewrightLM(TemplateLM):
    """A model of ours, or one of Hugging Face's that we opened.

    Args:
        model: causal, on `device`.
        codec: its texts.
        device: of the model.
        max_length: positions of a row.
        batch_size: rows that run together.
        stop_ids: tokens that end an answer besides the tokenizer's own.
        chat: renders conversations; None where the model has no template.
        name: of the tokenizer, for the harness.
        seed: of sampled answers.
    """

    def __init__(
        self,
        model: Model,
        codec: TextCodec,
        *,
        device: torch.device | str = "cpu",
        max_length: int,
        batch_size: int = 8,
        stop_ids: Sequence[int] = (),
        chat: ChatTemplate | None = None,
        name: str = "tilewright",
        seed: int = 1234,
    ):
        super().__init__()
        self.model, self.codec, self.chat = model, codec, chat
        self._device = torch.device(device)
        self.max_length, self.batch_size, self._name = max_length, batch_size, name
        self._stop_ids = {codec.eos_id, *stop_ids}
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """Departures from what lm_eval asked for, each with its number of requests."""
        return [f"{text}: {count} requests" for text, count in self._counts.items()] + self.model.notes

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text for lm_eval's model."""
        return self.codec.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context for lm_eval's model."""
        return self.codec.prefix_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name of lm_eval's model, for the harness' cache of requests."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template's text of lm_eval's model where it is applied."""
        return self.chat.source if chat_template and self.chat else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text for lm_eval's model. Where the template takes no system message it is left out, as the
        harness does.

        Args:
            chat_history: messages.
            add_generation_prompt: False: the last message is the beginning of an answer, which is left open.
        """
        if self.chat is None:
            raise AssertionError("a chat template is applied, and the model has none")
        try:
            text = self.chat.render(chat_history, add_generation_prompt)
        except ChatError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            self._counts["The template takes no system message: left out"] += 1
            text = self.chat.render(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text for lm_eval's model; see `TextCodec.encode`."""
        return self.codec.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score the answer of each lm_eval request: (log-likelihood in nats, true if greedy decoding gives that
        answer)."""
        pairs = []
        for request in requests:
            context, answer = cast(tuple[str, str], request.args)
            if context:
                ids = self._encode_pair(context, answer)
                if answer and not ids[1]:
                    self._counts["The tokenizer joins the answer to its context: encoded alone"] += 1
                    ids = (ids[0], self.tok_encode(answer, add_special_tokens=False))
            else:
                ids = ([self.prefix_token_id], self.tok_encode(answer, add_special_tokens=False))
                if ids[1][:1] == ids[0]:
                    ids = (ids[0], ids[1][1:])
            pairs.append(((context, answer), *ids))
        return self._loglikelihood_tokens(pairs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of each whole text by lm_eval's model, in windows of `max_length` tokens that do not
        overlap."""
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            found = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            parts = [make_disjoint_window(window) for window in found] if ids else []
            windows += [(None, context, target) for context, target in parts]
            counts.append(len(parts))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[tuple[float, bool]]:
        """Score answers given as ids by lm_eval's model. Requests that differ in their answer's last token alone share
        a row."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        scored = [index for index, request in enumerate(requests) if request[2]]
        order = Collator(
            [requests[index] for index in scored],
            sort_fn=lambda request: (-len(request[1] + request[2]), tuple(request[1] + request[2])),
            group_fn=lambda request: request[1] + request[2][:-1],
            group_by="contexts",
        )
        results: list[tuple[float, bool]] = []
        with ProgressBar("tasks") as progress:
            progress.phase("log-likelihoods", len(scored))
            for batch in order.get_batched(n=self.batch_size):
                for (texts, context, answer), log_probs_SV in zip(batch, self._log_probs(batch), strict=True):
                    shared = order.get_cache(
                        req_str=texts, cxt_toks=context, cont_toks=answer, logits=log_probs_SV[None]
                    )
                    scores = [_score(own, log_probs_1SV[0]) for _, own, log_probs_1SV in shared]
                    results += scores
                    progress.advance(len(scores))
        for index, score in zip(scored, order.get_original(results), strict=True):
            found[index] = score
        return found

    @torch.no_grad()
    def _log_probs(self, batch: Sequence[Request]) -> list[torch.Tensor]:
        """Log-probabilities by lm_eval's model of each request, FP32 [answer, V], at the places of its answer."""
        rows = []
        for _, context, answer in batch:
            if len(answer) > self.max_length:
                raise DataError(
                    "Answer of a task is longer than the model's context",
                    got=f"{len(answer)} tokens",
                    need=f"at most {self.max_length}",
                    try_="a task with shorter answers",
                )
            if len(context) + len(answer) > self.max_length + 1:
                self._counts[f"Context cut from the left to {self.max_length} tokens"] += 1
            rows.append((context + answer)[-(self.max_length + 1) :][:-1])
        longest = max(map(len, rows))
        ids_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self._device)
        wanted_BS = torch.zeros(ids_BS.shape, dtype=torch.bool)
        for row, (ids, (_, _, answer)) in enumerate(zip(rows, batch, strict=True)):
            wanted_BS[row, len(ids) - len(answer) : len(ids)] = True
        with evaluation(self.model), eager():
            logits_NV = self.model.logits_at(ids_BS, wanted_BS.to(self._device))
        return list(logits_NV.log_softmax(-1).split([len(answer) for _, _, answer in batch]))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Write a text after the context of each lm_eval request, up to a stop text."""
        order = Collator(
            [cast(tuple[str, dict[str, Any]], request.args) for request in requests],
            sort_fn=lambda request: (-len(self.tok_encode(request[0])), request[0]),
            group_fn=lambda request: request[1],
            group_by="gen_kwargs",
        )
        results: list[str] = []
        with ProgressBar("tasks") as progress:
            progress.phase("generated answers", len(requests))
            for batch in order.get_batched(n=self.batch_size):
                prompts = [self.tok_encode(context) for context, _ in batch]
                for part in _similar(prompts):
                    results += self._generate(part, batch[0][1])
                    progress.advance(len(part))
        return order.get_original(results)

    def _generate(self, prompts: Sequence[list[int]], arguments: dict[str, Any]) -> list[str]:
        # 1. What ends an answer: the task's own texts, and those of the model's chat template.
        settings: dict[str, Any] = dict(normalize_gen_kwargs(arguments, DEFAULT_NEW_TOKENS))
        eos = self.codec.decode([self.codec.eos_id], skip_special=False)
        stops = [text for text in handle_stop_sequences(settings.pop("until", None), eos=eos) if text]
        stops += self.chat.stops.texts if self.chat else ()
        num_tokens = settings.pop("max_gen_toks")
        sampling = _sampling(settings)
        # 2. Prompts, cut from the left where prompt and answer are longer than the context; this is counted.
        room = self.max_length - num_tokens
        if room <= 0:
            raise ConfigError(
                "Task asks for longer answers than the model's context",
                got=f"max_gen_toks {num_tokens}, a context of {self.max_length} tokens",
                need=f"at most {self.max_length - 1}",
                try_="--include-path FOLDER with a copy of the task that has a smaller max_gen_toks",
            )
        self._counts[f"Context cut from the left to {room} tokens"] += sum(len(ids) > room for ids in prompts)
        self._counts = +self._counts
        rows = [torch.tensor(ids[-room:] or [self.prefix_token_id], device=self._device) for ids in prompts]

        def is_done(row: int, new: list[int]) -> bool:
            text = self.codec.decode(new, skip_special=False)
            return new[-1] in self._stop_ids or any(stop in text for stop in stops)

        # 3. The answers, without the token that ended them.
        written = continue_rows(
            self.model, rows, num_tokens, sampling=sampling, is_done=is_done, generator=self._generator
        )
        texts = []
        for ids in written:
            kept = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
            texts.append(postprocess_generated_text(self.codec.decode(kept), stops, None))
        return texts


def _score(answer: list[int], log_probs_SV: torch.Tensor) -> tuple[float, bool]:
    """Score an lm_eval answer by the log-probabilities at its positions, or at more: a group's requests may be split
    otherwise."""
    targets_S = torch.tensor(answer, device=log_probs_SV.device)
    own_SV = log_probs_SV[-len(answer) :]
    greedy = bool((own_SV.argmax(-1) == targets_S).all())
    return float(own_SV.gather(1, targets_S[:, None]).sum()), greedy


def _similar(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Group sorted prompts of lm_eval by similar lengths."""
    parts: list[list[list[int]]] = []
    for ids in prompts:
        if parts and len(parts[-1][0]) - len(ids) <= _SPREAD:
            parts[-1].append(ids)
        else:
            parts.append([ids])
    return parts


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Read how an lm_eval task wants its tokens to be drawn.

    Raises:
        ConfigError: in a way that is not ours.
    """
    draws = settings.pop("do_sample", False)
    temperature = float(settings.pop("temperature", 1.0 if draws else 0.0))
    top_k, top_p = int(settings.pop("top_k", 0)), float(settings.pop("top_p", 1.0))
    others = {name: value for name, value in settings.items() if value != _NEUTRAL.get(name)}
    if others:
        raise ConfigError(
            "Task generates in a way that is not supported",
            got=", ".join(f"{name} = {value}" for name, value in others.items()),
            need="until, max_gen_toks, do_sample, temperature, top_k, top_p",
            try_=f"--include-path FOLDER with a copy of the task without {', '.join(others)}",
        )
    return Sampling(temperature if draws else 0.0, top_k, top_p)
