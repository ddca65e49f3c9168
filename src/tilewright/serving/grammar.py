"""Answers whose text keeps to a JSON schema, or is a call of a tool: `llguidance` says which tokens may come next.

The package is an extra of its own (`grammar`). Without it requests that need it are refused in words.

Legend: V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.serving.api.logprobs import TokenTexts
from tilewright.serving.api.tool_calls import Kind

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line: a model that may write white space may do so for ever."""


class GrammarError(Exception):
    """A grammar took more work than the library allows for a token."""


class GrammarConstraint:
    """Tokens that may continue one answer. Implements `next_token.Constraint`.

    Args:
        matcher: of llguidance, at the beginning of a text.
    """

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> Tensor | None:
        """Tokens that the grammar allows, bool [V]; None where the text is complete."""
        if self._matcher.is_stopped():
            self._check()
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.zeros(vocab_size, dtype=bool)
        found = np.unpackbits(bits, bitorder="little")[:vocab_size]
        allowed[: len(found)] = found
        return torch.from_numpy(allowed)

    def take(self, token: int) -> None:
        """Take into the grammar the token that was drawn."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error()[:200])


class Grammars:
    """Makes constraints for the answers of one model.

    Args:
        tokenizer: of the model.
        stop_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self._tokenizer, self._stop_ids = tokenizer, list(stop_ids)

    def of_schema(self, schema: Mapping[str, Any]) -> GrammarConstraint:
        """A grammar of JSON that a schema describes.

        Raises:
            ConfigError: the package is not there.
            DataError: it is no schema, or one that the package does not know.
        """
        text = json.dumps(dict(schema))
        return self._constraint(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT))

    def of_calls(self, kind: Kind, tools: Sequence[Mapping[str, Any]]) -> GrammarConstraint:
        """Make the grammar of calls of these tools: the arguments follow each tool's schema.

        Args:
            kind: how calls are written.
            tools: as templates have them.

        Raises:
            ConfigError: the package is not there.
            DataError: parameters that are no schema, or one that the package does not know.
        """
        functions = [tool["function"] for tool in tools]
        names = " | ".join(f"call_{i}" for i in range(len(functions)))
        begin, end, key = self._around(kind)
        rules = [f"start: {begin} ({names}) {end}"]
        for i, function in enumerate(functions):
            head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
            schema = json.dumps(dict(function["parameters"]) | {"x-guidance": _COMPACT})
            rules.append(f'call_{i}: {head} args_{i} "}}"\nargs_{i}: %json {schema}')
        return self._constraint(self._library.LLMatcher.grammar_from_lark("\n".join(rules)))

    def _around(self, kind: Kind) -> tuple[str, str, str]:
        if kind == "hermes":
            line = json.dumps("\n")
            return f"{self._mark('<tool_call>')} {line}", f"{line} {self._mark('</tool_call>')}", "arguments"
        if kind == "mistral":
            return f"{self._mark('[TOOL_CALLS]')} {json.dumps('[')}", json.dumps("]"), "arguments"
        return "", "", "parameters"

    def _mark(self, text: str) -> str:
        """A mark in a grammar, as its token where that stands for no text."""
        token = self._tokenizer.backend.token_to_id(text)
        return f"<[{token}]>" if token in self._tokenizer.special_ids else json.dumps(text)

    def _constraint(self, grammar: str) -> GrammarConstraint:
        message = self._library.LLMatcher.validate_grammar(grammar, self._ll_tokenizer)
        matcher = self._library.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if message or matcher.is_error():
            raise DataError(
                "JSON schema cannot be followed",
                got=(message or matcher.get_error()).strip()[:300],
                need="a schema of the kinds that llguidance knows",
                try_="a simpler schema",
            )
        return GrammarConstraint(matcher)

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "Answers in a given form need the package llguidance",
                got=str(error),
                need="the extra `grammar` where the server runs",
                try_="pip install 'tilewright[grammar]'",
            ) from error
        return llguidance

    @cached_property
    def _ll_tokenizer(self) -> Any:
        words = self._library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._stop_ids[0]))
        return self._library.LLTokenizer(words, n_vocab=self._tokenizer.vocab_size, eos_token=self._stop_ids)


class _Vocabulary:
    """A tokenizer as the grammar library wants it: the bytes of each token, and the tokens of a text that is forced.

    The library's own reading of tokenizer.json knows fewer kinds of decoders.
    """

    def __init__(self, tokenizer: Tokenizer, eos_id: int):
        texts = TokenTexts(tokenizer)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_id, tokenizer.bos_id
        self.special_token_ids = list(tokenizer.special_ids)
        self.tokens = [texts.bytes_of(i) for i in range(tokenizer.vocab_size)]
        special = frozenset(tokenizer.special_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text that a grammar forces: the tokenizer's own, unless it adds a space in front; else the
        longest tokens that fit, one after the other."""
        wanted = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(wanted.decode("utf-8", "replace"))
        if b"".join(self.tokens[i] for i in ids) == wanted:
            return ids
        found, at = [], 0
        while at < len(wanted):
            sizes = range(min(self._longest, len(wanted) - at), 0, -1)
            size = next((size for size in sizes if wanted[at : at + size] in self._ids), None)
            if size is None:
                break
            found.append(self._ids[wanted[at : at + size]])
            at += size
        return found
