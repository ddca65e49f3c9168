"""The tokenizer in an artefact beside the run's own: ids, begin and end, template, positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPECIAL = 16
"""Odd texts that are asked for with begin and end, too."""
_SHOWN = 12


@dataclass(frozen=True)
class ReferenceTexts:
    """The answers that an artefact's tokenizer should give.

    Args:
        texts: held-out documents, then odd texts.
        token_ids: of each of them, without begin and end.
        num_documents: how many of them are held-out documents.
        begin, end: ids that an artefact's tokenizer puts around a text.
        facts: what an artefact says of itself, such as {"positions": 2048, "chat_template": "..."}; what an artefact
            cannot tell is left out of the comparison.
    """

    texts: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()
    num_documents: int = 0
    begin: Sequence[int] = ()
    end: Sequence[int] = ()
    facts: Mapping[str, Any] | None = None

    @property
    def special(self) -> Sequence[int]:
        """Indices of the reference texts that are asked for with begin and end."""
        return range(self.num_documents, min(self.num_documents + SPECIAL, len(self.texts)))


def compare_texts(
    expected: ReferenceTexts,
    plain: Sequence[Sequence[int]] | None,
    special: Sequence[Sequence[int]] | None,
    facts: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], str]:
    """Compare texts by the tokenizer in an artefact: counts for the record, and what differs, in words; "" where
    nothing does.

    Args:
        expected: of the run.
        plain: ids of all texts; None: the artefact has no tokenizer.
        special: ids of `expected.special`, with begin and end.
        facts: as the runtime tells them.
    """
    if plain is None:
        return {"token_ids": None}, _facts(expected, facts)
    same = [list(a) == list(b) for a, b in zip(plain, expected.token_ids, strict=True)]
    documents, odd = same[: expected.num_documents], same[expected.num_documents :]
    found: dict[str, Any] = {
        "token_ids": {"equal": sum(documents), "documents": len(documents)},
        "odd_texts": {"equal": sum(odd), "texts": len(odd)},
    }
    told = []
    if not all(same):
        at = same.index(False)
        told.append(
            f"other token ids for {len(same) - sum(same)} of {len(same)} texts, first {_short(expected.texts[at])}: "
            f"{_ids(plain[at])} in place of {_ids(expected.token_ids[at])}"
        )
    for at, ids in zip(expected.special, special or (), strict=special is not None):
        wanted = [*expected.begin, *expected.token_ids[at], *expected.end]
        if list(ids) != wanted and same[at]:
            text = _short(expected.texts[at])
            told.append(f"other begin or end of a text, of {text}: {_ids(ids)} in place of {_ids(wanted)}")
            break
    return found, "; ".join(filter(None, [*told, _facts(expected, facts)]))


def _facts(expected: ReferenceTexts, facts: Mapping[str, Any] | None) -> str:
    wanted = expected.facts or {}
    wrong = [
        name for name, value in (facts or {}).items() if name in wanted and _rendered(wanted[name]) != _rendered(value)
    ]
    return "; ".join(f"{name}: {_short(facts[name])} in place of {_short(wanted[name])}" for name in wrong if facts)


def _rendered(value: Any) -> Any:
    """A rendered template of compared texts as Jinja reads it, without the newline at its end: llama.cpp gives it
    so."""
    return value.removesuffix("\n") if isinstance(value, str) else value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 5 * _SHOWN else f"{text[: 5 * _SHOWN]}..."


def _ids(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:_SHOWN]))}{', ...' if len(ids) > _SHOWN else ''}]"
