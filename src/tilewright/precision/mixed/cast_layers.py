"""torch's own layers, computing in a format of their choice: FP32 parameters in, low-precision matmuls out.

Each class here is a subclass of the torch layer it is in for and adds nothing but four settings, so `convert` can
turn one into the other in place: the same module object, parameters, names, hooks and state_dict. The weight is cast
where it is used, once a forward, and its gradient comes back in the parameter's own dtype.

Why no copy is kept between forwards: torch's fused AdamW writes parameters without moving their `_version` (seen in
torch 2.13), as do writes through `.data`, and a copy that missed one would train on stale weights without a sign.
Casting in the graph is always right, also under torch.compile and recomputation. Its cost is in
docs/reference/precision.md.

TF32 where no TF32 unit is at hand: operands rounded to 10 mantissa bits, matmuls and sums in FP32. A matmul of two such
values is exact in FP32, so this has the operands of a TF32 unit in all three matmuls of a layer. A unit may
round its operands otherwise than to nearest even, and adds in its own order.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from tilewright.formats.spec import SPECS, TF32, round_to
from tilewright.ops.backends.native.wide import widens
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue, breaks_graph, queue_now
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import machines_linear
from tilewright.precision.mixed.derived import is_injected, rebased

if TYPE_CHECKING:  # the kind of layer that each mixin stands in front of
    _Layer, _Conv, _ConvTranspose, _InstanceNorm, _BatchNorm = (
        nn.Module, nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d, nn.BatchNorm2d,
    )  # fmt: skip
else:
    _Layer = _Conv = _ConvTranspose = _InstanceNorm = _BatchNorm = object


class Cast(_Layer):
    """Settings of a converted layer. Plain attributes: compiled code is rebuilt when one changes."""

    compute_dtype: torch.dtype = torch.float32
    """Dtype of the operands."""
    output_dtype: torch.dtype = torch.float32
    """Dtype of the result, where the layer does not keep its input's."""
    round_tf32: bool = False
    """Round FP32 operands to TF32."""

    def set_formats(self, compute: str, output: str, *, round_tf32: bool) -> None:
        """Set the formats that a casting layer computes in.

        Args:
            compute: format of the operands, by name ("bf16").
            output: format of the result.
            round_tf32: for compute "tf32": round here, because no TF32 unit does.
        """
        self.compute_dtype = SPECS[compute].dtype
        self.output_dtype = SPECS[output].dtype
        self.round_tf32 = round_tf32

    def _no_autocast(self, run: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """Run run(x, *args) outside of any autocast region: a casting layer chooses its own format."""
        if queue := breaks_graph(self):
            return queue.eagerly(self._no_autocast, run, x, *args)  # type: ignore[misc]
        if not torch.is_autocast_enabled(x.device.type):
            return run(x, *args)
        with torch.autocast(x.device.type, enabled=False):
            return run(x, *args)

    def _matmul(
        self, matmul: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The matmul of a casting layer from TF32 operands, in FP32."""
        return tf32_matmul(matmul, x.to(torch.float32), weight.to(torch.float32), bias)

    def extra_repr(self) -> str:
        """Describe a casting layer for print: the torch layer's own text and the formats."""
        compute = "tf32" if self.round_tf32 else str(self.compute_dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, compute={compute}"


class CastLinear(Cast, nn.Linear):
    """x W^T + b in `compute_dtype` with FP32 accumulation. x [..., K] any float dtype -> [..., N] `output_dtype`."""

    kernels: Kernels | None = None
    """Implementations of the operations; None takes torch's own linear, or its FP32 one (`ops.linear`)."""
    weight_queue: WeightGradientQueue | None = None
    """Where weight gradients may wait. Set by `gradient_queues.attach`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._no_autocast(self._run, x)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the weight of a casting linear layer before they are cast. A loss that takes the head's weight
        and not its forward asks too."""
        return x, self.weight

    def _run(self, x: Tensor) -> Tensor:
        x, weight = self.operands(x)
        if self.round_tf32:
            out = self._matmul(self._multiply, x, weight, self.bias)
        elif self.kernels is not None:  # they cast the weight, and give its gradient in as many bits as they can
            out = self.kernels.linear(x.to(self.compute_dtype), weight, self.bias, queue_now(self))
        else:
            out = machines_linear(x.to(self.compute_dtype), weight, self.bias, queue_now(self))
        return out.to(self.output_dtype)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        linear = F.linear if self.kernels is None else self.kernels.linear
        return linear(x, weight, bias)


class CastEmbedding(Cast, nn.Embedding):
    """Rows of the table, rounded to `compute_dtype`, in `output_dtype`. The table is not cast whole."""

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(super().forward(input)).to(self.compute_dtype).to(self.output_dtype)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [..., D] of a casting embedding before they are cast."""
        return rows


class _CastConv(Cast, _Conv):
    """A convolution in `compute_dtype`; x [B, C, ...] any float dtype -> `output_dtype`."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self._no_autocast(self._run, input, output_size)

    def _run(self, x: Tensor, output_size: list[int] | None) -> Tensor:
        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return self._convolve(x, weight, None, output_size)

        if self.round_tf32:
            bias = None if self.bias is None else self.bias.view(-1, *[1] * len(self.kernel_size))
            out = self._matmul(convolve, x, self.weight, bias)
        else:
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            x, weight = x.to(self.compute_dtype), self.weight.to(self.compute_dtype)
            if widens(x.device.type, self.compute_dtype):
                x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
            out = self._convolve(x, weight, bias, output_size).to(self.compute_dtype)
        return out.to(self.output_dtype)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


class _CastConvTranspose(_CastConv, _ConvTranspose):
    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None) -> Tensor:
        spatial = len(self.kernel_size)
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
        layer: Any = self  # torch's own forward gives tuples where its annotations say lists
        padding = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        return function(x, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)


class CastConv1d(_CastConv, nn.Conv1d): ...


class CastConv2d(_CastConv, nn.Conv2d): ...


class CastConv3d(_CastConv, nn.Conv3d): ...


class CastConvTranspose1d(_CastConvTranspose, nn.ConvTranspose1d): ...


class CastConvTranspose2d(_CastConvTranspose, nn.ConvTranspose2d): ...


class CastConvTranspose3d(_CastConvTranspose, nn.ConvTranspose3d): ...


class _CastNorm(Cast):
    """A norm in FP32 whatever comes in and however its parameters are stored or gathered (FSDP2's `param_dtype`); the
    result takes the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return self._no_autocast(self._run, input)

    def _run(self, x: Tensor) -> Tensor:
        return self._normalize(x.to(torch.float32)).to(x.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        """Normalise FP32 values in a casting layer."""
        raise NotImplementedError

    def _wide(self, param: Tensor | None) -> Tensor | None:
        return None if param is None else param.to(torch.float32)


class CastLayerNorm(_CastNorm, nn.LayerNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self._wide(self.weight), self._wide(self.bias), self.eps)


class CastRMSNorm(_CastNorm, nn.RMSNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self._wide(self.weight), self.eps)


class CastGroupNorm(_CastNorm, nn.GroupNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self._wide(self.weight), self._wide(self.bias), self.eps)


class _CastInstanceNorm(_CastNorm, _InstanceNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        return super(_CastNorm, self).forward(x)

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        """Normalise by instance norm as a casting layer: as `nn.InstanceNorm1d`, which takes no parameters of another
        dtype."""
        weight, bias, of_input = self._wide(self.weight), self._wide(self.bias), not self.track_running_stats
        kept = self.running_mean, self.running_var
        return F.instance_norm(input, *kept, weight, bias, self.training or of_input, self.momentum or 0.0, self.eps)


class CastInstanceNorm1d(_CastInstanceNorm, nn.InstanceNorm1d): ...


class CastInstanceNorm2d(_CastInstanceNorm, nn.InstanceNorm2d): ...


class CastInstanceNorm3d(_CastInstanceNorm, nn.InstanceNorm3d): ...


class _CastBatchNorm(_CastNorm, _BatchNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        """Normalise by batch norm as a casting layer: as `nn.BatchNorm1d.forward`, which takes no parameters of another
        dtype."""
        self._check_input_dim(x)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else momentum
        kept = (self.running_mean, self.running_var) if self.track_running_stats or not self.training else (None, None)
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        weight, bias = self._wide(self.weight), self._wide(self.bias)
        return F.batch_norm(x, *kept, weight, bias, of_batch, momentum, self.eps)


class CastBatchNorm1d(_CastBatchNorm, nn.BatchNorm1d): ...


class CastBatchNorm2d(_CastBatchNorm, nn.BatchNorm2d): ...


class CastBatchNorm3d(_CastBatchNorm, nn.BatchNorm3d): ...


_LAYERS = (
    *(CastLinear, CastEmbedding),
    *(CastConv1d, CastConv2d, CastConv3d, CastConvTranspose1d, CastConvTranspose2d, CastConvTranspose3d),
    *(CastLayerNorm, CastRMSNorm, CastGroupNorm, CastInstanceNorm1d, CastInstanceNorm2d, CastInstanceNorm3d),
    *(CastBatchNorm1d, CastBatchNorm2d, CastBatchNorm3d),
)
CASTS: dict[type[nn.Module], type[nn.Module]] = {layer.__bases__[-1]: layer for layer in _LAYERS}
"""torch layer -> the class that is in for it. Exact types: a subclass may mean something else by its forward."""


def plain_layer(module: nn.Module) -> type[nn.Module]:
    """The plain class under a casting layer; if FSDP2 shards the module by itself, the class before that: FSDP2 makes a
    class of (its mixin, the module's class)."""
    kind = type(module)
    return kind.__bases__[-1] if FSDPModule in kind.__bases__ else kind


def become(module: nn.Module, layer: type[nn.Module]) -> None:
    """Make a module a casting layer: another class in place of its `plain_layer`. FSDP2's mixin stays before it, and
    the class of torch's parametrizations over it."""
    kind = type(module)
    if is_injected(module):
        module.__class__ = rebased(kind, layer)
    else:
        module.__class__ = layer if kind is plain_layer(module) else _before(kind, layer)


@functools.cache
def _before(kind: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """A casting layer's class made as `kind` was, over another layer."""
    names = {name: value for name, value in vars(kind).items() if name in ("__deepcopy__", "__module__")}
    return type(f"FSDP{layer.__name__}", (*kind.__bases__[:-1], layer), names)


class _RoundValue(torch.autograd.Function):
    """Rounds in forward; the gradient passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return round_to(x, TF32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _RoundGradient(torch.autograd.Function):
    """Passes in forward; rounds the gradient, the operand that both backward matmuls share."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return round_to(grad.contiguous(), TF32)


def tf32_matmul(
    matmul: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """TF32 matmul of a casting layer: `matmul(x, weight) + bias`, the matmul linear in both, with TF32 operands forward
    and backward.

    Args:
        matmul: a linear layer or convolution without bias.
        x: FP32 input.
        weight: FP32 weight.
        bias: added in FP32, as broadcasting has it.

    Example:
        >>> x, w = torch.tensor([[1.0 + 2**-12]]), torch.tensor([[3.0]])
        >>> tf32_matmul(torch.nn.functional.linear, x, w)
        tensor([[3.]])
    """
    out = _RoundGradient.apply(matmul(_RoundValue.apply(x), _RoundValue.apply(weight)))
    if bias is not None:
        return out + bias
    # A view made inside of a Function: autograd lets nobody write into it, as an activation in place does.
    return out.clone() if out.requires_grad else out
