"""The operations of one run, each with its chosen implementation.

One `Kernels` object is made for a machine and handed to the models and the optimizer; there is no
global state. `explain` lists every choice with the reasons against the other candidates.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.config.change_recipe import loss_chunk_bytes as default_loss_chunk
from tilewright.core.config.recipe import MemorySection, OpsSection
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.adam import ADAM, FOLLOW_WRITES, LOW_BIT_ADAM, MASTER_ADAM
from tilewright.ops.attention import ATTENTION, BY_DOCUMENTS, LINEAR_ATTENTION, attention_kind, reads_documents
from tilewright.ops.backends.native.attention import attention_to_past
from tilewright.ops.backends.ref import linear_attention as ref_linear
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors
from tilewright.ops.base.deferred_linear import deferred_linear
from tilewright.ops.base.dispatch import Case, Choice, choose
from tilewright.ops.base.documents import STARTS, Segments, documents_of, segments_of
from tilewright.ops.base.labels import ClassSlice, TokenLosses
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.ops.gemm import TILE_GEMM, kind_of
from tilewright.ops.int8_linear import INT8_LINEAR
from tilewright.ops.linear import CACHED_LAYER, LINEAR, ROW_LINEAR, gemms_of
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY
from tilewright.ops.newton_schulz import NEWTON_SCHULZ
from tilewright.ops.norm import RMS_NORM
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE, quantize_kind

OPS = (
    *(LINEAR, ROW_LINEAR, CACHED_LAYER, RMS_NORM, ATTENTION, LINEAR_ATTENTION, LINEAR_CROSS_ENTROPY),
    *(NEWTON_SCHULZ, INT8_LINEAR),
    *(ADAM, MASTER_ADAM, LOW_BIT_ADAM, FOLLOW_WRITES),
    *(QUANTIZE, QUANTIZE_BOTH, TILE_GEMM, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IN_TRANSFORMS = {op.name: op.in_transforms for op in OPS if op.in_transforms is not None}

_INSTEAD = {(op.name, op.candidates[-1].name): op.instead for op in OPS if op.instead}

Key = tuple[str, str, torch.dtype, str]


class Kernels:
    """Chosen implementations of all operations on one machine.

    Args:
        machine: facts about this machine.
        overrides: candidate by operation name, "auto" where absent (recipe section `[ops]`).
        compile: False bars the candidates built by torch.compile.
        loss_chunk_bytes: bytes of logits alive at once in the head's loss; None: as the machine has it by default.
        attention_block: query rows at a time in attention, 0 for all.

    Raises:
        ConfigError: an override that does not exist. (One that cannot run a case is a HardwareError at its first use.)

    Example:
        >>> kernels = Kernels.default()
        >>> kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        machine: Machine,
        overrides: Mapping[str, str] | None = None,
        *,
        compile: bool = True,
        loss_chunk_bytes: int | None = None,
        attention_block: int = 0,
    ):
        overrides = dict(overrides or {})
        self.machine = machine
        self.forced = frozenset(name for name, candidate in overrides.items() if candidate != "auto")
        """Operations whose candidate was asked for."""
        self.loss_chunk_bytes = default_loss_chunk(machine) if loss_chunk_bytes is None else loss_chunk_bytes
        self.attention_block = attention_block
        self.spec = json.dumps(
            [machine.to_json(), overrides, compile, self.loss_chunk_bytes, attention_block], sort_keys=True
        )
        """All that this was made from, as text: `kernels_of` makes an equal one from it."""
        barred = {} if compile else {"compiled": "compilation is off"}
        devices = ("cpu",) if machine.device == "cpu" else ("cpu", machine.device)
        self.choices: dict[Key, Choice] = {}
        self.impossible: dict[Key, HardwareError] = {}
        cases = (
            (op, Case(device, dtype, kind))
            for op, device, dtype in itertools.product(OPS, devices, DTYPES)
            for kind in op.kinds_on(device)
        )
        for op, case in cases:
            key = (op.name, case.device_type, case.dtype, case.kind)
            try:
                self.choices[key] = choose(op, machine, case, overrides.get(op.field, "auto"), barred)
            except HardwareError as error:  # told when, and only if, a run needs this case
                self.impossible[key] = error
        self._run = {key: choice.candidate.run for key, choice in self.choices.items()}
        attention = {key: choice.candidate.name for key, choice in self.choices.items() if key[0] == "attention"}
        self._by_documents = frozenset(key for key, name in attention.items() if reads_documents(name, key[1]))
        self._wide = frozenset(key for key, choice in self.choices.items() if choice.candidate.name == "wide")
        self._devices_by_documents = frozenset(key[1] for key, name in attention.items() if name in BY_DOCUMENTS)

    @classmethod
    def default(cls) -> "Kernels":
        """Choose the best kernels of all operations for the machine this runs on."""
        return cls(detect_machine())

    @classmethod
    def from_sections(cls, machine: Machine, ops: OpsSection, memory: MemorySection) -> "Kernels":
        """The kernels that a recipe's sections [ops] and [memory] ask for."""
        loss_chunk_bytes, attention_block = memory.loss_chunk_bytes, memory.attention_block
        return cls(machine, ops.model_dump(), loss_chunk_bytes=loss_chunk_bytes, attention_block=attention_block)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kernels":
        """Return the same kernels for a copied model: nothing here changes, and built libraries cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Callable[[str], "Kernels"], tuple[str]]:
        """Kernels pickled as what they were made from."""
        return kernels_of, (self.spec,)

    def _find(self, op: str, device: str, dtype: torch.dtype, kind: str = "") -> Callable[..., Any]:
        if op in _IN_TRANSFORMS and in_func_transform():
            return _IN_TRANSFORMS[op]
        run = self._run.get((op, device, dtype, kind))
        if run is None:
            raise self.impossible[op, device, dtype, kind]
        return run

    def linear(
        self, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None, queue: WeightGradientQueue | None = None
    ) -> Tensor:
        """Run a linear layer by its kernel: see `ops.linear`. With a `queue` the weight's gradient waits if that takes
        it (`ops.base.weight_gradient_queue`)."""
        run = self._find("linear", x.device.type, x.dtype)
        if queue is None:
            return run(x, weight_MK, bias_M)
        chosen = self.choices["linear", x.device.type, x.dtype, ""].candidate.name
        return deferred_linear(gemms_of(chosen), x, weight_MK, bias_M, queue)

    def rounds_gradient(self, device_type: str, dtype: torch.dtype) -> bool:
        """True if the kernel of `linear` rounds the gradient of a weight in FP32 to the operands' dtype."""
        choice = self.choices.get(("linear", device_type, dtype, ""))
        return choice is not None and choice.candidate.name == "native"

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise by RMS with the chosen kernel: see `ops.norm`."""
        return self._find("rms_norm", x.device.type, x.dtype)(x, weight_D, eps)

    def attention(
        self,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        *,
        segments: Segments = None,
        scale: float | None = None,
        block: int | None = None,
        window: int = 0,
    ) -> Tensor:
        """Compute attention by the chosen kernel: see `ops.attention`. `block`: query rows at a time, 0 for all, None
        for `attention_block`."""
        rows = self.attention_block if block is None else block
        if window < 0:
            raise ValueError(f"a window has at least 1 position, or is 0 for all before, not {window}")
        window = window if window < q_BHSD.shape[2] else 0  # it hides nothing: the same kernel, the same bits
        device, dtype = q_BHSD.device.type, q_BHSD.dtype
        kind = attention_kind(device, q_BHSD.shape[-1], segments is not None, window > 0)
        by_documents = ("attention", device, dtype, kind) in self._by_documents and not in_func_transform()
        read = segments if by_documents else segments_of(segments)
        return self._find("attention", device, dtype, kind)(q_BHSD, k_BHSD, v_BHSD, read, scale, rows, window)

    def documents(self, batch: Mapping[str, Tensor]) -> Segments:
        """Find the documents of a batch once, for all layers that call `attention`: its `segments`, and also where
        documents begin if attention on this device reads that. None where each row is one document.

        Args:
            batch: `segments` [B, S] where rows are packed; with `ops.base.documents.STARTS` no device is waited for,
                and a CPU goes through the documents one by one.

        Raises:
            DataError: a document is in pieces.
        """
        segments_BS = batch.get("segments")
        if segments_BS is None:
            return None
        device = segments_BS.device.type
        if device not in self._devices_by_documents and not (device == "cpu" and STARTS in batch):
            return segments_BS
        return documents_of(segments_BS, batch.get(STARTS))

    def attention_to_past(self, q_BHSD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, window: int = 0) -> Tensor:
        """The kernel of attention to the past, of the last S of T positions, by torch, with FP32 operands where
        `attention` has them. No gradient is asked of it. `window`: see `ops.attention`; keys before it may be left
        out."""
        wide = ("attention", q_BHSD.device.type, q_BHSD.dtype, "") in self._wide
        return attention_to_past(q_BHSD, k_BHTD, v_BHTD, wide=wide, window=window)

    def linear_attention(
        self,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        decay_BHS: Tensor,
        rate_BHS: Tensor,
        *,
        segments: Segments = None,
    ) -> Tensor:
        """Compute linear attention by the chosen kernel: see `ops.attention`."""
        run = self._find("linear_attention", q_BHSD.device.type, q_BHSD.dtype)
        return run(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, segments_of(segments))

    def linear_attention_from(
        self,
        state_BHDD: Tensor | None,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        decay_BHS: Tensor,
        rate_BHS: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute linear attention of the next positions of one document by the kernel for them, from the state that
        earlier ones left (None: there are none); returns the state after them too, [B, H, D, D] in FP32. No gradient is
        asked of it."""
        if q_BHSD.shape[2] == 1:  # of one position, calls take the time
            return ref_linear.with_state(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, state_BHDD)
        from tilewright.ops.backends import linear_attention  # it registers torch operators

        return linear_attention.with_state(q_BHSD, k_BHSD, v_BHSD, decay_BHS, rate_BHS, state_BHDD)

    def linear_cross_entropy(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        queue: WeightGradientQueue | None = None,
        *,
        classes: ClassSlice | None = None,
    ) -> TokenLosses:
        """Compute the output matrix's loss by the chosen kernel: see `ops.loss`. `queue`: as in `linear`, but not for
        the reference; `classes`: some of them."""
        run = self._find("cross_entropy", x_ND.device.type, x_ND.dtype)
        if classes is not None:
            return run(x_ND, weight_VD, labels_N, self.loss_chunk_bytes, queue, classes)
        return run(x_ND, weight_VD, labels_N, self.loss_chunk_bytes, queue)

    def adam(self, device_type: str, dtype: torch.dtype, *, masters: bool = False) -> Callable[..., None]:
        """The kernel of the AdamW update for parameters of this device and dtype, or for masters with weights. See
        `ops.adam`."""
        return self._find("master_adam" if masters else "adam", device_type, dtype)

    def low_bit_adam(self, tensors: LowBitTensors, hyper: AdamHyper) -> None:
        """Update by AdamW with moments in 8 bits, by the chosen kernel: see `ops.adam`."""
        self._find("low_bit_adam", tensors.target.device.type, tensors.target.dtype)(tensors, hyper)

    def follow_writes(self, master: Tensor, weight: Tensor) -> None:
        """Give FP32 masters the values that others wrote to their 16-bit weights, by the chosen kernel: see
        `ops.adam`."""
        self._find("follow_writes", weight.device.type, weight.dtype)(master, weight)

    def newton_schulz(self, device_type: str) -> Callable[..., Tensor]:
        """The chosen kernel of Muon's iteration on this device: a function, which has its argument to itself. See
        `ops.newton_schulz`."""
        return self._find("newton_schulz", device_type, torch.bfloat16)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute SwiGLU, silu(gate) * up, in FP32 inside; it has one form only, which the compiler fuses."""
        return ref.swiglu(gate, up)

    def rope(self, x_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
        """The kernel of rotary positions, FP32 inside; one form only, fused by the compiler."""
        return ref.rope(x_BSHD, cos_BSD, sin_BSD)

    def quantize(self, x_MK: Tensor, form: OperandFormat, *, noise: Tensor | None = None) -> TiledTensor:
        """Quantise a matrix by the chosen kernel: see `ops.quantize`."""
        kind = quantize_kind(form, noise)
        return self._find("quantize", x_MK.device.type, x_MK.dtype, kind)(x_MK, form, noise)

    def quantize_both(self, x_MK: Tensor, form: OperandFormat) -> tuple[TiledTensor, TiledTensor]:
        """Quantise a matrix by rows and by columns, by the chosen kernel: see `ops.quantize`."""
        return self._find("quantize_both", x_MK.device.type, x_MK.dtype, quantize_kind(form))(x_MK, form)

    def tile_gemm(
        self, a: TiledTensor, b: TiledTensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype
    ) -> Tensor:
        """Multiply two quantised matrices by the chosen kernel: see `ops.gemm`."""
        return self._find("tile_gemm", a.qdata.device.type, out_dtype, kind_of(a, b))(a, b, bias_N, out_dtype)

    def rms_norm_quantize(
        self, x: Tensor, weight_D: Tensor, eps: float, form: OperandFormat
    ) -> tuple[Tensor, TiledTensor, TiledTensor]:
        """Normalise by RMS and quantise the result, by the chosen kernel: see `ops.quantize`."""
        return self._find("rms_norm_quantize", x.device.type, x.dtype, quantize_kind(form))(x, weight_D, eps, form)

    def swiglu_quantize(self, gate: Tensor, up: Tensor, form: OperandFormat) -> tuple[Tensor, TiledTensor, TiledTensor]:
        """Compute SwiGLU and quantise the result, by the chosen kernel: see `ops.quantize`."""
        run = self._find("swiglu_quantize", gate.device.type, gate.dtype, quantize_kind(form))
        return run(gate, up, form)

    def explain(self) -> list[dict[str, object]]:
        """Explain which kernels were chosen, a row per operation and case: op, case, chosen (None: nothing can run it;
        `Op.instead` where callers would not run the reference), rejected [(candidate, reason)]."""
        rows = [
            {
                "op": choice.op,
                "case": str(choice.case),
                "chosen": _INSTEAD.get((choice.op, choice.candidate.name), choice.candidate.name),
                "rejected": [list(pair) for pair in choice.rejected],
            }
            for choice in self.choices.values()
        ]
        for (op, device, dtype, kind), error in self.impossible.items():
            reasons = [["all", error.problems[0].got]]
            rows.append({"op": op, "case": str(Case(device, dtype, kind)), "chosen": None, "rejected": reasons})
        return rows


@functools.lru_cache(maxsize=32)
def kernels_of(spec: str) -> Kernels:
    """The kernels of a `Kernels.spec`, for operators of torch, which take no Python objects.

    Example:
        >>> kernels = Kernels(detect_machine("cpu"), {"linear": "ref"})
        >>> kernels_of(kernels.spec).explain() == kernels.explain()
        True
    """
    machine, overrides, compile, loss_chunk_bytes, attention_block = json.loads(spec)
    capability = machine["capability"]
    facts = {
        **machine,
        "capability": None if capability is None else tuple(capability),
        "cpu_features": frozenset(machine["cpu_features"]),
        "cpu_limits": tuple(machine["cpu_limits"]),
    }
    return Kernels(
        Machine(**facts), overrides, compile=compile, loss_chunk_bytes=loss_chunk_bytes, attention_block=attention_block
    )
