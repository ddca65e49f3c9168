"""How far an artefact may be from the model that it was made of: one table, a row for each target.

Two distances, each a mean divergence (KL) in nats per target. `kl` is from the model itself: what the format costs.
`stored` is from a model with the values that the artefact stores: what its runtime computes otherwise, the rounding of
activations and of 16-bit sums, and damage of every kind. It is smaller, so it finds what the rounding of four bits
would
cover: a tensor of zeros, rows in another order, another rotary base. `top1` is the share of clear targets, at which the
model's likeliest token has twice the second's probability, that have the same likeliest token; it is judged where there
are `FEWEST_CLEAR` of them, which a model that has learned little has not.

Measured means: on recipe `default` after 2,000 steps, benchmarks/results/export_default_avx512.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_README = "llama.cpp, tools/perplexity/README.md, Llama 3 8B"


@dataclass(frozen=True)
class Tolerance:
    """The limits of one target, and where they are from. None: not asked."""

    kl: float
    top1: float
    source: str
    stored: float | None = None


FEWEST_CLEAR = 20
TOLERANCES: Mapping[str, Tolerance] = {
    "hf": Tolerance(5e-3, 0.97, "sums in BF16; measured 1.6e-4"),
    "fp8": Tolerance(2e-2, 0.95, "E4M3 has 4 digits; measured 2.0e-3"),
    "gguf-f16": Tolerance(1e-4, 0.99, "weights, inputs and cache in F16; measured 6.1e-7", 1e-4),
    "gguf-q8_0": Tolerance(1e-2, 0.97, f"{_README}: 1.4e-3; measured 3.4e-4", 5e-3),
    "gguf-q4_0": Tolerance(0.25, 0.80, f"{_README}: 7.2e-2; measured 2.9e-2. Inputs in 8 bits, as q8_0", 5e-3),
    "onnx": Tolerance(1e-5, 0.99, "FP32 in another order of sums; measured 1.9e-12", 1e-5),
    "onnx-int8": Tolerance(1e-2, 0.95, "inputs in 8 bits with one scale per tensor; measured 3.0e-3", 1e-2),
    # `onnx.check_matrices` holds its weights, too.
    "onnx-qdq": Tolerance(0.1, 0.85, "inputs in 8 bits with a scale fixed by 16 rows of text", 0.1),
    "openvino-int8": Tolerance(1e-2, 0.95, "as onnx-int8; measured 4.3e-4", 1e-2),
    "executorch-8da4w": Tolerance(0.25, 0.80, "as gguf-q4_0; measured 3.6e-2. Inputs in 8 bits per token", 1e-2),
    "aoti": Tolerance(1e-5, 0.99, "FP32 in another order of sums; measured 5.9e-13", 1e-5),
}


def beyond(tolerance: Tolerance, row: Mapping[str, object]) -> str:
    """The numbers of a proof beyond their tolerance, in words; "" where there is none.

    Args:
        tolerance: of the target.
        row: with `kl`, `clear`, `top1_clear` and `stored`, as `Proof.of` makes it.

    Example:
        >>> tolerance = Tolerance(1e-2, 0.97, "an example")
        >>> beyond(tolerance, {"kl": 7.03, "clear": 400, "top1_clear": 0.014})
        'KL 7 from the model, at most 0.01; 1.4 % of clear targets have the same likeliest token, at least 97 %'
        >>> beyond(tolerance, {"kl": 1e-3, "top1_clear": None})
        ''
    """
    found = []
    kl, top1, stored = (row.get(name) for name in ("kl", "top1_clear", "stored"))
    if isinstance(kl, float) and not kl <= tolerance.kl:
        found.append(f"KL {kl:.2g} from the model, at most {tolerance.kl:g}")
    away = stored.get("kl") if isinstance(stored, Mapping) else None
    if isinstance(away, float) and tolerance.stored is not None and not away <= tolerance.stored:
        found.append(f"KL {away:.2g} from the values that are stored, at most {tolerance.stored:g}")
    clear = row.get("clear")
    if isinstance(clear, int) and clear >= FEWEST_CLEAR and isinstance(top1, float) and top1 < tolerance.top1:
        share = f"{100 * top1:.3g} % of clear targets have the same likeliest token"
        found.append(f"{share}, at least {100 * tolerance.top1:.3g} %")
    return "; ".join(found)
