"""Targets `hf` and `fp8`: a Hugging Face folder in BF16 that transformers loads, and one in FP8 to train on from."""

import functools
from pathlib import Path

import torch

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.core.errors import CheckpointError
from tilewright.core.units import format_bytes, format_share
from tilewright.formats.fp8_layout import CODE_DTYPE
from tilewright.models.folder.fp8_weights import fp8_bytes
from tilewright.models.hf.load import AUTO_CLASSES
from tilewright.training.components.export import write_beside


def _write(dtype: torch.dtype, source: ExportSource, path: Path) -> Written:
    source.model.save_hf(path, dtype=dtype, extra=source.config_keys)
    if not source.reads_images:
        write_beside(source.recipe, source.run, source.model, source.text_rules, path)
    if dtype != CODE_DTYPE:
        return Written(options={"task": source.task, "auto": AUTO_CLASSES[source.task]})
    in_fp8, total = fp8_bytes(path)
    section = source.recipe.model.model_copy(update={"weights": "load", "path": ""}).model_dump()
    return Written(
        notes=(f"{format_bytes(in_fp8)} of {format_bytes(total)} in FP8 ({format_share(in_fp8 / total)})",),
        options={
            "section": section,
            "vocab_size": source.tokenizer.vocab_size,
            "weights": "",
            "dtype": "fp32",
            "compile": False,
        },
    )


def _why_not(dtype: torch.dtype, source: ExportSource) -> str | None:
    try:
        source.model.check_save_hf(dtype)
    except CheckpointError as error:
        return "; ".join(f"{problem.what}: {problem.got}" for problem in error.problems)
    return None


_TRANSFORMERS = Consumer(
    "transformers", "tilewright.compress.prove.transformers_folder", packages=("transformers",), extra="hf"
)
_TILEWRIGHT = Consumer("tilewright", "tilewright.compress.prove.torch_model")

HF = Target(
    name="hf",
    use="training",
    file="{run}-bf16",
    write=functools.partial(_write, torch.bfloat16),
    why_not=functools.partial(_why_not, torch.bfloat16),
    consumer=_TRANSFORMERS,
    images=True,
)
FP8 = Target(
    name="fp8",
    use="training",
    file="{run}-fp8",
    write=functools.partial(_write, CODE_DTYPE),
    why_not=functools.partial(_why_not, CODE_DTYPE),
    consumer=_TILEWRIGHT,
)
