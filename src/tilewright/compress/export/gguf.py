"""Targets `gguf-f16`, `gguf-q8_0`, `gguf-q4_0`: one file for llama.cpp and what is built on it.

Matrices are in the asked format, the embedding included (a tied head is the same matrix, stored once); vectors stay
FP32. Length, begin and end of a text and chat template are those of the Hugging Face folder of the same run.
"""

import functools
from pathlib import Path

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import Coded
from tilewright.compress.export.target import Consumer, Target, Use, Written
from tilewright.compress.gguf.architecture import shape_of, state, why_no_shape
from tilewright.compress.gguf.gguf_writer import beyond, write_file
from tilewright.compress.gguf.read_formats import read_formats
from tilewright.compress.gguf.tensors import BLOCK, stored_values
from tilewright.compress.gguf.vocabulary import normal_form, vocabulary, why_no_vocabulary
from tilewright.compress.stored_values import in_codes
from tilewright.training.components.export import max_positions

_LLAMA_CPP = Consumer("llama.cpp", "tilewright.compress.prove.llama_cpp", packages=("xllamacpp",), extra="gguf")
_NO_SERVER = "llama.cpp's server does not start without a tokenizer; the file was read back by the package gguf"
_NORMALIZED = (
    "llama.cpp does not normalise text: callers give it in {form} (unicodedata.normalize), or get other token ids; the "
    "proof did"
)


def _why_not(asked: str, source: ExportSource) -> str | None:
    reason = why_no_shape(source.model, source.task)
    if reason is None and not source.without_tokenizer:
        reason = _why_no_vocabulary(source)
        reason = reason and f"{reason}; --without-tokenizer writes the weights alone"
    if reason is None and asked != "f16":
        matrices = [tensor for tensor in state(source.model).values() if tensor.dim() > 1]
        if all(tensor.shape[-1] % BLOCK for tensor in matrices):
            reason = f"{asked} has blocks of {BLOCK} elements, and no row of the model is a multiple of that"
    return reason


def _why_no_vocabulary(source: ExportSource) -> str | None:
    rules = source.text_rules
    return why_no_vocabulary(source.tokenizer, rules.begin, rules.end, normalized=source.normalized_text)


def _write(asked: str, source: ExportSource, path: Path) -> Written:
    shape = shape_of(source.model, max_positions(source.recipe, source.model))
    notes, form, words, rules = [], "", None, source.text_rules
    # 1. Text: a vocabulary that gives the same ids, or none. Other ids would be wrong without an error.
    if _why_no_vocabulary(source) is None:
        words = vocabulary(source.tokenizer, shape.vocab_size, rules.begin, rules.end)
        form = normal_form(source.tokenizer)
        notes += [_NORMALIZED.format(form=form)] if form else []
    else:
        notes.append("written without a tokenizer: callers make token ids, and llama.cpp's library takes them")
    eos_id = rules.eos_id(source.tokenizer)
    unknown = beyond(eos_id, rules.stops, words.tokens) if words else ()
    if unknown:
        notes.append(f"llama.cpp has room for three tokens that end an answer; callers stop at {', '.join(unknown)}")
    # 2. Matrices. Q4_0 takes negative scales, which lose less (`stored_codes`).
    coded = source.four_bits_signed if asked == "q4_0" else Coded(source.model)
    notes += [coded.how] if coded.how else []
    write_file(
        path,
        asked,
        shape,
        state(coded.model),
        words,
        codes=coded.of_net(),
        name=source.run.resolve().name,
        bos_id=source.tokenizer.bos_id,
        eos_id=eos_id,
        stops=rules.stops,
        pad_id=source.tokenizer.pad_id,
        chat_template=rules.template,
    )
    # 3. Formats as read back from the file, not as asked for.
    formats = read_formats(path)
    if asked != "f16" and formats.get("f16"):
        notes.append(f"{formats['f16']} matrices stay F16: their rows are no multiple of {BLOCK}")
    return Written(
        notes=notes,
        quantized=formats,
        lint_only="" if words else _NO_SERVER,
        options={"normalize": form},
        stored=lambda: in_codes(coded.model, coded.codes, lambda name, module, values: stored_values(values, asked)),
        trained=coded.trained,
    )


def _target(asked: str, use: Use) -> Target:
    return Target(
        name=f"gguf-{asked}",
        use=use,
        file=f"{{run}}-{asked}.gguf",
        write=functools.partial(_write, asked),
        why_not=functools.partial(_why_not, asked),
        consumer=_LLAMA_CPP,
        packages=("gguf",),
        extra="gguf",
        takes="int4" if asked == "q4_0" else "",
    )


F16, Q8_0, Q4_0 = _target("f16", "serving"), _target("q8_0", "serving"), _target("q4_0", "edge")
