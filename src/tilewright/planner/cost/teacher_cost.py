"""The cost of the teacher of `[distill]` in a step: bytes beside the student's, and seconds.

Its weights and last hidden values are there all the time. It runs forward on all micro-batches before the student runs
on the first; nothing is kept for backward. The loss takes logits of both (`models.distill.loss`), chunk by chunk, each
chunk made twice: in forward, and again in backward. With a cache it hands on some of its tokens, and the student's
logits are made once (in FP16 twice); where the cache has all rows of the run it is not there at all. Of several ranks
each has the whole teacher and exchanges nothing for it; in a row (`parallel.pp`) each has some of its layers, and
passes all micro-batches through these.
"""

from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import LayerMemory
from tilewright.models.distill.chunked_loss import rows_at_once
from tilewright.planner.cost.layer_choices import GlobalConfig, Links
from tilewright.planner.cost.layer_cost import forward_s
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.model_shape import ModelShape, TeacherShape
from tilewright.planner.model.roofline import CAST_BYTES, head_s, loss_s

FP32 = 4
ALIVE = 0.7
"""Of what an eager layer keeps for backward, what is alive at once where nothing is kept (counted: 0.65 to 0.72 at two
widths, in FP32 and in BF16)."""
CHUNKS = {"forward_kl": 7.0, "reverse_kl": 7.0, "jensen_shannon": 10.0}
"""FP32 chunks of logits alive at once in backward of the loss, by divergence (counted: about 6.5 in BF16, 7 in FP32;
three more with the middle of two distributions)."""
TOP_K_CHUNKS, TOP_K_SCALED_CHUNKS = 2.0, 4.0
"""The same of a loss from tokens that were kept (counted: 1.9 to 2.1 at temperature one, 3.9 to 4.0 at others)."""
TOP_K_AGAIN = 2.0
"""More chunks where each of several is made again in backward, as in FP16 (counted: 1.6 to 2.2)."""
TOP_K_LOSSES, TOP_K_SCALED_LOSSES = 0.8, 1.9
"""Times the eager loss, as below, at temperature one and at others (measured in pairs on a CPU: 0.75 and 1.85)."""
LOSSES = 2.5
"""Times the eager FP32 loss of a student without a teacher, matmuls left out (measured on a busy CPU: 1.8 to 4.0 with
300 and 4,000 words; larger vocabularies were not)."""


def held_bytes(shape: ModelShape, tokens: int, at_once: int) -> float:
    """Bytes of a teacher that are on the device all the time: the weights, its outputs for so many tokens of a step,
    and the values that losses of hidden states keep for a micro-batch of `at_once` tokens."""
    teacher = shape.teacher
    if teacher is None:
        return 0.0
    return teacher.runs * teacher.weights + teacher.learned + tokens * teacher.hidden + at_once * teacher.apart


def forward_bytes(shape: ModelShape, rows: int) -> float:
    """Bytes while the teacher runs on a micro-batch of so many rows, in addition."""
    if shape.teacher is None or not shape.teacher.runs:
        return 0.0
    model = shape.teacher.model
    layer = max((found.kept(rows) for found in (*model.classes, model.rest)), default=0.0)
    return ALIVE * (1 + model.spread) * layer


def loss_bytes(shape: ModelShape, tokens: int, chunk_bytes: int, *, on_cpu: bool) -> float:
    """The bytes of a loss on logits of both at its busiest chunk of a micro-batch: logits and distributions in FP32, a
    gradient of the student's head, and a 16-bit copy of that where matmuls are in 16 bits."""
    row = FP32 * shape.vocab_size
    rows = max(1, chunk_bytes // row)
    if shape.teacher is not None and shape.teacher.top_k:
        rows = rows_at_once(shape.vocab_size, shape.dim, chunk_bytes, on_cpu=on_cpu)
    chunk = min(tokens, rows) * row
    several = chunk < tokens * row and shape.matmul_format == "fp16"
    copies = 2 if shape.matmul_bytes < FP32 else 1
    return _chunks(shape.teacher, several) * chunk + copies * shape.matmul_bytes * shape.vocab_size * shape.dim


def _chunks(teacher: TeacherShape | None, several: bool) -> float:
    if teacher is not None and teacher.top_k:
        return (TOP_K_CHUNKS if teacher.temperature == 1 else TOP_K_SCALED_CHUNKS) + several * TOP_K_AGAIN
    return CHUNKS["forward_kl" if teacher is None else teacher.divergence]


def teacher_s(
    shape: ModelShape, setting: GlobalConfig, recipe: Recipe, rates: Ceilings, links: Links
) -> dict[str, float]:
    """Seconds per step of a teacher by part: the forward pass, with casts of its weights, and the logits. Nothing
    without a teacher, or if its shape is not known."""
    if shape.teacher is None or shape.teacher.model.unknown:
        return {}
    model, tokens = shape.teacher.model, setting.micro_batch_size * shape.seq_len
    logits = _losses(setting) * _logits_s(shape, tokens, setting.loss_chunk_bytes, rates)
    if not shape.teacher.runs:
        return {"teacher": setting.num_micro * logits}
    args = (LayerMemory(), setting, model, recipe, rates, links)
    forward = forward_s(model.rest, *args)
    for found in model.classes:
        share = found.count / recipe.parallel.pp
        forward += share * (forward_s(found, *args) + CAST_BYTES * found.cast / rates.bandwidth)
    if shape.teacher.top_k:  # its own logits are made once, whatever passes the student takes
        forward += _head_s(shape, tokens, model.dim, rates)
    return {"teacher": setting.num_micro * (forward + logits)}


def head_parts_s(shape: ModelShape, setting: GlobalConfig, rates: Ceilings) -> dict[str, float]:
    """Seconds of a step in a student's plain head and its loss, with a teacher or without; with one the loss is never
    compiled."""
    tokens, fmt = setting.micro_batch_size * shape.seq_len, shape.matmul_format
    logits, times = tokens * shape.vocab_size, setting.num_micro * _losses(setting)
    loss = loss_s(logits, shape.loss_compiled, fmt, rates)
    if shape.teacher is not None:
        of_kept = TOP_K_LOSSES if shape.teacher.temperature == 1 else TOP_K_SCALED_LOSSES
        times_plain = of_kept if shape.teacher.top_k else LOSSES
        loss = times_plain * loss_s(logits, False, "fp32", rates)
    return {"head": times * head_s(tokens, shape.dim, shape.vocab_size, fmt, rates), "loss": times * loss}


def _logits_s(shape: ModelShape, tokens: int, loss_chunk_bytes: int, rates: Ceilings) -> float:
    """Seconds of both passes of the teacher's head, and one more of the student's. From kept tokens the student's
    alone, where several chunks are made again."""
    assert shape.teacher is not None
    ours = _head_s(shape, tokens, shape.dim, rates)
    if shape.teacher.top_k:
        again = shape.matmul_format == "fp16" and tokens * FP32 * shape.vocab_size > loss_chunk_bytes
        return ours if again else 0.0
    return 2 * _head_s(shape, tokens, shape.teacher.model.dim, rates) + ours


def _head_s(shape: ModelShape, tokens: int, dim: int, rates: Ceilings) -> float:
    """Seconds of a forward pass of a teacher's or student's head: a third of `head_s`."""
    return head_s(tokens, dim, shape.vocab_size, shape.matmul_format, rates) / 3


def _losses(setting: GlobalConfig) -> int:
    """How often a step with a teacher runs the head."""
    return 1 if setting.can.whole_gradient else setting.passes
