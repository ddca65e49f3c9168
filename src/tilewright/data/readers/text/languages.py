"""The language of a text by py3langid, whose package carries its model of 97 languages."""

from functools import lru_cache
from typing import Any

_MAX_CHARS = 4096
"""From more than this nothing is learned about a text in one language."""


@lru_cache(maxsize=1)
def _identifier() -> Any:
    """Loading the model takes half a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def find_language(text: str) -> tuple[str, float]:
    """The language of `text` as ISO 639-1 code, and its probability. Needs the package py3langid.

    Example:
        >>> find_language("Alle Menschen sind frei und gleich an Würde und Rechten geboren.")[0]
        'de'
    """
    language, probability = _identifier().classify(text[:_MAX_CHARS])
    return str(language), float(probability)
