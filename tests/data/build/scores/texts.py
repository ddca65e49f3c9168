"""Texts of an invented language in which words follow each other by habit, so that a model can learn it."""

import json
import random
from pathlib import Path

from tilewright.data.stages.scores.corruptions import KINDS

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
_RNG = random.Random(4)
VOCABULARY = ["".join(_RNG.choices(_SYLLABLES, k=_RNG.randint(1, 3))) for _ in range(300)]
_FOLLOWERS = {word: _RNG.choices(VOCABULARY, k=3) for word in VOCABULARY}


def story(seed: int, num_words: int = 200) -> str:
    """Sentences in paragraphs; different for each seed."""
    rng = random.Random(seed)
    word, text = rng.choice(VOCABULARY), []
    for i in range(num_words):
        word = rng.choice(_FOLLOWERS[word]) if rng.random() < 0.8 else rng.choice(VOCABULARY)
        end = "" if (i + 1) % 9 else ".\n\n" if (i + 1) % 45 == 0 else "."
        text.append((word.title() if i % 9 == 0 else word) + end)
    return " ".join(text).replace("\n\n ", "\n\n").strip() + "\n"


def write_texts(folder: Path, texts: dict[str, str]) -> Path:
    """Files below a folder by name."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def shouted(seed: int) -> str:
    """What is not wanted: the same words, in another manner."""
    return story(seed, 80).upper().replace(".", "!!!")


def write_scored_corpus(root: Path) -> Path:
    """Two domains of stories in `in`, some of them shouted, and some noise; examples of both kinds beside them."""
    texts = {f"in/a/{i:03}.txt": story(i, 150) for i in range(110)}
    texts |= {f"in/b/{i:03}.txt": story(1000 + i, 150) for i in range(70)}
    texts |= {f"in/a/loud{i}.txt": shouted(2000 + i) for i in range(12)}
    texts |= {f"in/b/noise{i}-{kind}.txt": make(story(3000 + i), i) for i in range(4) for kind, make in KINDS.items()}
    texts |= {f"good/{i}.txt": story(4000 + i, 80) for i in range(60)}
    texts |= {f"bad/{i}.txt": shouted(5000 + i) for i in range(60)}
    write_texts(root, texts)
    labelled = [{"text": story(4000 + i, 80), "label": "good"} for i in range(60)]
    labelled += [{"text": shouted(5000 + i), "label": 0} for i in range(60)]
    odd = ['{"text": 1, "label": 1}', '{"text": "no label"}', "[1]", "{", '{"text": "a", "label": "perhaps"}']
    (root / "labelled.jsonl").write_text("\n".join([*map(json.dumps, labelled), *odd]) + "\n")
    return root


def all_three(corpus: Path, **more: dict) -> dict:
    quality = {"good": str(corpus / "good"), "bad": str(corpus / "bad"), "threshold": 0.5}
    sample = {"reference": "corpus", "weights": (1.0, 0.5), "order": 4}
    sections = {"quality": quality, "noise": {"clean": "corpus", "order": 4, "allow_weak": True}, "sample": sample}
    return {name: values | more.get(name, {}) for name, values in sections.items()}
