"""Looks at linear layers while a model computes: what 8 bits do to their tensors, and to their matmuls.

A sample is a forward and a backward pass in eager mode with hooks on each `Float8Linear`. On some of the rows each
matmul is computed in 8 bits and in BF16, whatever the layer itself computes in: so the evidence says what 8 bits
would do, also where a matmul has left them. Nothing is decided here; `controller` judges.

Cost: a pass in eager mode, and for each layer six matmuls and the quantisation of at most `max_rows` rows. With one
row on the default recipe that is 0.8 of a step on a CPU (`benchmarks/results/dpaa_cost_cpu.json`), so 0.8 % of the
time with a sample every 100 steps.

Legend: N tokens  K input features  M output features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.formats.quant_error import measure
from tilewright.formats.tiled import TiledTensor, WithCopies
from tilewright.models.base.eval_mode import eager
from tilewright.ops.base.tensor_parts import local
from tilewright.ops.kernels import Kernels
from tilewright.precision.controller.layer_statistics import GemmStats, LayerStats, QuantStats, TensorStats
from tilewright.precision.float8.linear import Float8Linear, float8_layers
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, TILES
from tilewright.precision.snapshot import preserved

_ROWS = 128
"""Rows of a tile of the column-wise copies: rows are picked in such runs."""


class Monitor:
    """Takes samples of a model's `Float8Linear` layers.

    Args:
        model: converted before; layers are looked up at each sample, as modes may change them.
        max_rows: rows (tokens) of each layer's input that are looked at, and rows of its weight, in runs of 128 spread
            over all of them.

    Example:
        >>> from tilewright.precision.convert import convert
        >>> model = nn.Sequential(nn.Linear(128, 128))
        >>> model = convert(model, "fp8_tile")
        >>> x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        >>> evidence = Monitor(model).sample([lambda: model(x).square().mean().backward()])
        >>> evidence.layers["0"].matmuls["fprop.fp8_tile"].cosine > 0.99, model[0].weight.grad
        (True, None)
    """

    def __init__(self, model: nn.Module, *, max_rows: int = 256) -> None:
        self._model = model
        self._max_rows = max(max_rows, _ROWS)

    def sample(self, passes: Iterable[Callable[[], object]]) -> QuantStats:
        """Let the monitor run extra passes for evidence, merged into the worst of each number. The model is left as it
        was.

        Args:
            passes: each runs a forward and a backward pass.
        """
        found = []
        for run in passes:
            with preserved(self._model), self.watching() as evidence:
                run()
            found.append(evidence())
        return QuantStats.worst(found)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], QuantStats]]:
        """Watch linear layers by the monitor in the passes that run inside, which run in eager mode. Gives a function
        that returns what was seen."""
        layers = float8_layers(self._model)
        seen: list[QuantStats] = []
        # Experts that run as one operation are not called as modules: inside they run one by one.
        runners: list[tuple[Any, Any]] = [
            (part, part.expert_runner) for part in self._model.modules() if vars(part).get("expert_runner") is not None
        ]
        handles = [  # before what joins parts of outputs, and before what an adapter adds
            layer.register_forward_hook(self._hook(name, seen), prepend=True) for name, layer in layers.items()
        ]
        for module, _ in runners:
            module.expert_runner = None
        try:
            with eager():
                yield lambda: QuantStats.worst(seen)
        finally:
            for handle in handles:
                handle.remove()
            for module, runner in runners:
                module.expert_runner = runner

    def _hook(self, name: str, seen: list[QuantStats]) -> Callable[..., None]:
        def forward(layer: Float8Linear, args: tuple[Any, ...], out: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            if not out.requires_grad:
                # A frozen layer of what needs no gradient: backward comes as far as its output where an adapter adds
                # to it, and is asked to.
                if "lora_A" not in layer._parameters:
                    return
                out.requires_grad_()
            given = args[0]
            x = (given.value if isinstance(given, WithCopies) else given).detach()

            def backward(dy: Tensor) -> None:
                seen.append(QuantStats({name: self._measure(layer, x, dy)}))

            out.register_hook(backward)

        return forward

    @torch.no_grad()
    def _measure(self, layer: Float8Linear, x: Tensor, dy: Tensor) -> LayerStats:
        x_NK, dy_NM = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        rows = picked_rows(len(x_NK), self._max_rows, x_NK.device)
        if rows is not None:
            x_NK, dy_NM = x_NK[rows], dy_NM[rows]
        return measure_layer(layer, x_NK, dy_NM, max_rows=self._max_rows) if len(x_NK) else LayerStats()


def picked_rows(num_rows: int, max_rows: int, device: torch.device) -> Tensor | None:
    """Pick rows for the monitor: indices of whole runs of 128 rows (the last may be shorter), spread evenly; None for
    all rows.

    Example:
        >>> picked_rows(1000, 256, torch.device("cpu"))[[0, 127, 128, -1]].tolist()
        [0, 127, 896, 999]
    """
    if num_rows <= max_rows:
        return None
    last, num_runs = (num_rows - 1) // _ROWS, max_rows // _ROWS
    starts = torch.tensor([_ROWS * (run * last // max(num_runs - 1, 1)) for run in range(num_runs)], device=device)
    rows = (starts[:, None] + torch.arange(_ROWS, device=device)).flatten()
    return rows[rows < num_rows]


@torch.no_grad()
def measure_layer(layer: Float8Linear, x_NK: Tensor, dy_NM: Tensor, *, max_rows: int = 256) -> LayerStats:
    """Measure a layer by the monitor: errors of 8-bit tiles in its tensors and matmuls on these rows; BF16's matmuls
    too where it uses them. A frozen weight has no gradient: what that would be made of is not looked at.

    Args:
        layer: gives weight, kernels, kind of scale and present formats. Of a weight that is cut over ranks the part
            that is here, which is what this rank multiplies by.
        x_NK: its input [N, K].
        dy_NM: the gradient of its output [N, M].
        max_rows: rows of the weight whose loss is measured, in whole blocks of 128; its matmuls are with all of it.
    """
    kernels = layer.kernels
    if kernels is None:
        raise AssertionError("convert gives each Float8Linear its kernels")
    weight_MK = local(layer.weight.detach())
    # 1. The tensors in 8 bits, with the tiles of each matmul: rows for fprop and dgrad, columns for wgrad.
    forms = TILES.relaxed(power_of_two=layer.power_of_two)
    x8, x8_column = kernels.quantize_both(x_NK, forms.input)
    dy8, dy8_column = kernels.quantize_both(dy_NM, forms.gradient)
    weight8 = kernels.quantize(weight_MK, forms.weight)
    tensors = {
        "input": _tensor(x_NK, x8),
        "weight": _weight(weight_MK, weight8, max_rows),
        "gradient": _tensor(dy_NM, dy8),
    }
    if layer.weight.requires_grad:
        tensors |= {"input_column": _tensor(x_NK.T, x8_column), "gradient_column": _tensor(dy_NM.T, dy8_column)}
    in_8bit = {
        "fprop": (x8, weight8),  # [N, K] @ [M, K]^T -> [N, M]
        "dgrad": (dy8, weight8.transposed()),  # [N, M] @ [K, M]^T -> [N, K]
        "wgrad": (dy8_column, x8_column),  # [M, N] @ [K, N]^T -> [M, K]
    }
    # 2. The matmuls: 8 bits against BF16; BF16 against FP32 where a matmul computes in it at present.
    matmuls = {}
    for gemm in gemms_of(layer):
        shadow = _matmul(gemm, x_NK, weight_MK, dy_NM, torch.bfloat16, kernels)
        narrow = kernels.tile_gemm(*in_8bit[gemm], out_dtype=torch.bfloat16)
        matmuls[f"{gemm}.fp8_tile"] = compare(narrow, shadow)
        if not layer.gemms[gemm].scaled:
            wide = _matmul(gemm, x_NK, weight_MK, dy_NM, torch.float32, kernels)
            matmuls[f"{gemm}.bf16"] = compare(shadow, wide)
    return LayerStats(tensors, matmuls)


def gemms_of(layer: Float8Linear) -> tuple[str, ...]:
    """The matmuls of a layer that the monitor looks at: a frozen weight has none for its gradient.

    Example:
        >>> gemms_of(Float8Linear(128, 128).requires_grad_(False))
        ('fprop', 'dgrad')
    """
    return GEMM_NAMES if layer.weight.requires_grad else GEMM_NAMES[:2]


def _matmul(gemm: str, x_NK: Tensor, weight_MK: Tensor, dy_NM: Tensor, dtype: torch.dtype, kernels: Kernels) -> Tensor:
    x, weight, dy = x_NK.to(dtype), weight_MK.to(dtype), dy_NM.to(dtype)
    a, b = {"fprop": (x, weight), "dgrad": (dy, weight.T), "wgrad": (dy.T, x.T)}[gemm]
    return kernels.linear(a, b)


def _weight(weight_MK: Tensor, tiled: TiledTensor, max_rows: int) -> TensorStats:
    rows = picked_rows(len(weight_MK), max_rows, weight_MK.device)
    if rows is None:
        return _tensor(weight_MK, tiled)
    blocks = tiled.scale_inv[rows[::_ROWS] // _ROWS]
    return _tensor(weight_MK[rows], TiledTensor(tiled.qdata[rows], blocks, tiled.tile, tiled.spec))


def _tensor(x: Tensor, tiled: TiledTensor) -> TensorStats:
    error = measure(x, tiled)
    amax = float(x.abs().amax()) if x.numel() else 0.0
    return TensorStats(
        amax, error.underflow, error.saturation, error.not_finite, error.dynamic_range_log2, error.sqnr_db
    )


def compare(narrow: Tensor, shadow: Tensor) -> GemmStats:
    """Compare a matmul beside its shadow, for the monitor. Two matmuls of zeros agree.

    Example:
        >>> compare(torch.tensor([0.9, 0.0]), torch.tensor([1.0, 0.0])).gain_low
        0.8999999761581421
    """
    a, b = narrow.float(), shadow.float()
    largest = b.abs().amax()
    unit = torch.where(largest > 0, largest, 1.0)  # squares of small gradients would vanish in FP32
    a, b = a / unit, b / unit
    ab, bb, aa, noise = torch.stack([(a * b).sum(), (b * b).sum(), (a * a).sum(), (a - b).square().sum()]).tolist()
    if bb == 0:
        return GemmStats(1.0, 1.0, 1.0, float("inf") if aa == 0 else float("-inf"))
    if not all(value < float("inf") for value in (aa, bb)):  # NaN too
        nan = float("nan")
        return GemmStats(nan, nan, nan, nan)
    gain, cosine = ab / bb, ab / (aa * bb) ** 0.5 if aa else 0.0
    sqnr = float(10 * torch.tensor(bb / noise).log10()) if noise else float("inf")
    return GemmStats(gain, gain, cosine, sqnr)


def all_reduce_worst(
    evidence: QuantStats,
    names: Sequence[str],
    device: torch.device | str = "cpu",
    *,
    group: dist.ProcessGroup | None,
) -> QuantStats:
    """The monitor's evidence of matmuls over the ranks of a group, the worse of each number, so that all of them decide
    alike: one all-reduce.

    Args:
        evidence: of this rank.
        names: layers, the same on all ranks.
        device: of the tensor that is reduced: "cuda" for NCCL.
        group: the ranks; None gives the evidence itself.
    """
    if group is None:
        return evidence
    numbers = torch.tensor(evidence.vector(names), dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return QuantStats.from_vector(names, numbers.tolist())
