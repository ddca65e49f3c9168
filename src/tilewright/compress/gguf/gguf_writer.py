"""Writing one GGUF file: keys, tokens, tensors. The package `gguf` knows the container, this file its content."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tilewright.compress.gguf.architecture import GGUFShape
from tilewright.compress.gguf.tensors import named_tensors, stored_format
from tilewright.compress.gguf.vocabulary import Vocabulary
from tilewright.formats.integer import IntegerTensor

if TYPE_CHECKING:  # a package of an extra
    import gguf


def write_file(
    path: Path,
    asked: str,
    shape: GGUFShape,
    weights: Mapping[str, Tensor],
    words: Vocabulary | None,
    *,
    name: str,
    bos_id: int,
    eos_id: int,
    stops: Sequence[int],
    pad_id: int | None,
    chat_template: str | None,
    codes: Mapping[str, IntegerTensor] | None = None,
) -> None:
    """Write the GGUF file of a model.

    Args:
        path: of the file.
        asked: "f16", "q8_0" or "q4_0".
        shape: see `architecture.shape_of`.
        weights: under Hugging Face's names.
        words: None writes no tokenizer.
        name: of the model, shown by readers.
        eos_id: ends a text; what a template calls `eos_token`.
        stops: ids that end an answer, the one that the template teaches first. llama.cpp stops at three that a file
            names: the end of a text, of a turn, and of a message.
        codes: of weights in four bits that are written as they are, under Hugging Face's names.

    Raises:
        OSError: the file cannot be written.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, shape.arch)
    try:
        _add_shape(writer, shape, name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{asked.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if words is None:
            writer.add_tokenizer_model("none")
        else:
            _add_words(writer, words, bos_id, eos_id, pad_id)
            _add_stops(writer, eos_id, stops, words.tokens)
            if chat_template is not None:
                writer.add_chat_template(chat_template)
        for theirs, array, blocks in named_tensors(weights, shape, codes or {}):
            kind = kinds[stored_format(array, asked).upper()]
            raw = blocks if blocks is not None and kind == kinds.Q4_0 else gguf.quantize(array, kind)
            writer.add_tensor(theirs, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


_ENDS_BY_NAME = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>")
"""Tokens at which llama.cpp ends an answer wherever a vocabulary has them."""


def beyond(eos_id: int, stops: Sequence[int], tokens: Sequence[str]) -> tuple[str, ...]:
    """Names of the tokens that end an answer and that a GGUF file has no place for.

    Example:
        >>> beyond(0, [1, 0, 2, 3, 4], ["</s>", "<|end|>", "<|im_end|>", "<|user|>", "<|tool|>"])
        ('<|tool|>',)
    """
    return tuple(tokens[i] for i in _others(eos_id, stops, tokens)[2:] if tokens[i] not in _ENDS_BY_NAME)


def _others(eos_id: int, stops: Sequence[int], tokens: Sequence[str]) -> list[int]:
    """The tokens for a GGUF file that end an answer beside the end of a text: the template's own first, then those that
    llama.cpp needs listed."""
    others = [i for i in stops if i != eos_id]
    return others[:1] + sorted(others[1:], key=lambda i: tokens[i] in _ENDS_BY_NAME)


def _add_stops(writer: "gguf.GGUFWriter", eos_id: int, stops: Sequence[int], tokens: Sequence[str]) -> None:
    others = _others(eos_id, stops, tokens)
    for add, i in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(i)


def _add_shape(writer: "gguf.GGUFWriter", shape: GGUFShape, name: str) -> None:
    writer.add_name(name)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)


def _add_words(
    writer: "gguf.GGUFWriter",
    words: Vocabulary,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
) -> None:
    import gguf

    types = {
        "normal": gguf.TokenType.NORMAL,
        "control": gguf.TokenType.CONTROL,
        "user": gguf.TokenType.USER_DEFINED,
        "unused": gguf.TokenType.UNUSED,
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pattern)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types([types[kind] for kind in words.kinds])
    writer.add_token_merges(list(words.merges))
    writer.add_bos_token_id(bos_id)
    writer.add_eos_token_id(eos_id)
    if pad_id is not None:
        writer.add_pad_token_id(pad_id)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
