"""A text prompt becomes the ids that transformers' AutoTokenizer makes of it, whatever the tokenizer puts around it."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from tests.data.chat.families import FAMILIES, make_folder
from tilewright.data.common.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

FLAGS = ({}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True})
CLASSES = ("PreTrainedTokenizerFast", "Qwen2TokenizerFast", "GPT2TokenizerFast", "TokenizersBackend")


def _begin(backend, token):
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, backend.token_to_id(token))]
    )


def _both(backend, begin, end):
    ids = [(token, backend.token_to_id(token)) for token in (begin, end)]
    return processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{begin} $A {end}", pair=f"{begin} $A $B {end}", special_tokens=ids),
        ]
    )


PROCESSORS = {
    "none": lambda backend, names: None,
    "byte_level": lambda backend, names: processors.ByteLevel(trim_offsets=False),
    "begin": lambda backend, names: _begin(backend, names[0]),
    "both": lambda backend, names: _both(backend, names[0], names[-1]),
}


def _folder(root, name, processor, changes):
    folder = make_folder(root / f"{name}-{processor}-{len(list(root.iterdir()))}", name)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = PROCESSORS[processor](backend, FAMILIES[name].special)
    if made is not None:
        backend.post_processor = made
    backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Our tokenizer and theirs, of a dozen folders."""
    root = tmp_path_factory.mktemp("prompts")
    found = []
    for n, (name, processor) in enumerate(
        itertools.product(("qwen3", "smollm", "llama3", "mistral", "zephyr"), PROCESSORS)
    ):
        changes = FLAGS[n % len(FLAGS)]
        if not FAMILIES[name].metaspace:
            changes = changes | {"tokenizer_class": CLASSES[n % len(CLASSES)]}
        if n % 5 == 4:
            changes = changes | {"split_special_tokens": True}
        if n % 3 == 2:  # a word of the vocabulary that the folder calls special
            changes = changes | {"extra_special_tokens": ["hello"], "additional_special_tokens": ["hello"]}
        folder = _folder(root, name, processor, changes)
        found.append((folder, load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)))
    return found


NAMES = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.added)})
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(NAMES),
        st.sampled_from(["hello", " hello", "weather in Paris", "\n", "  ", "é🦊", "<|im_", "end|>", "[INST"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    ),
    max_size=8,
).map("".join)


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_ids_of_a_prompt_are_those_of_transformers(pairs, text):
    for folder, ours, theirs in pairs:
        expected = theirs(text)["input_ids"]
        assert ours.prompt_ids(text) == (expected or [ours.bos_id]), folder.name
