"""Ways to write a parameter or an input that PyTorch allows. Each returns nothing and changes values in place or binds
new ones; with most of them `_version` says nothing."""

import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass
class Case:
    """What a way of writing may use: a converted model, an optimizer over some of its parameters, an input."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor

    @property
    def weight(self) -> nn.Parameter:
        """The weight of the first linear layer."""
        return next(module for module in self.model.modules() if isinstance(module, nn.Linear)).weight

    def backward(self) -> torch.Tensor:
        """A loss with its gradients."""
        self.model.zero_grad()
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        return loss


def _no_grad(write: Callable[[nn.Parameter], object]) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        with torch.no_grad():
            write(case.weight)

    return run


def _inference(case: Case) -> None:
    with torch.inference_mode():
        case.weight.mul_(-2)


def _numpy(case: Case) -> None:
    case.weight.detach().numpy()[:] *= -2


def _one_element(case: Case) -> None:
    case.weight.data[-1, -1] += 100


def _half_an_ulp_of_fp8(case: Case) -> None:
    case.weight.data.mul_(1.0625)


def _two_values_change_places(case: Case) -> None:
    case.weight.data[:, :2] = case.weight.data[:, :2].flip(1)


def _step_of(make: Callable[[Case], torch.optim.Optimizer]) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        optimizer = make(case)
        case.backward()
        optimizer.step()

    return run


def _managed_step(case: Case) -> None:
    case.backward()
    case.optimizer.step()


def _lbfgs(case: Case) -> None:
    torch.optim.LBFGS(case.model.parameters(), lr=0.1, max_iter=4).step(case.backward)


def _sam(case: Case) -> None:
    """Up along the gradient, a gradient there, back, a step."""
    case.backward()
    params = [p for p in case.model.parameters() if p.grad is not None]
    ups = [0.3 * p.grad for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, ups)
    case.backward()
    with torch.no_grad():
        torch._foreach_sub_(params, ups)
        torch._foreach_add_(params, [p.grad for p in params], alpha=-0.5)


def _two_optimizers(case: Case) -> None:
    first, second = list(case.model.parameters())[::2], list(case.model.parameters())[1::2]
    case.backward()
    torch.optim.SGD(first, lr=1.0).step()
    torch.optim.AdamW(second, lr=0.1, fused=True).step()


def _submodule_state(case: Case) -> None:
    layer = next(module for module in case.model.modules() if isinstance(module, nn.Linear))
    layer.load_state_dict({name: -2 * value for name, value in layer.state_dict().items()})


def _assigned_state(case: Case) -> None:
    case.model.load_state_dict({n: -2 * v for n, v in case.model.state_dict().items()}, assign=True)


def _new_parameter(case: Case) -> None:
    layer = next(module for module in case.model.modules() if isinstance(module, nn.Linear))
    layer.weight = nn.Parameter(-2 * layer.weight.detach())


def _set_data(case: Case) -> None:
    case.weight.data = case.weight.data.clone().neg_()


def _transposed(case: Case) -> None:
    """The first weight is square."""
    case.weight.data = case.weight.data.T.contiguous()


def _transposed_memory(case: Case) -> None:
    case.weight.data = (-2 * case.weight.data).T.contiguous().T


def _swapped(case: Case) -> None:
    torch.utils.swap_tensors(case.weight, nn.Parameter(-2 * case.weight.detach()))


def _set(case: Case) -> None:
    with torch.no_grad():
        case.weight.set_((-2 * case.weight).clone())


def _vector(case: Case) -> None:
    vector_to_parameters(-parameters_to_vector(case.model.parameters()), case.model.parameters())


def _storage(case: Case) -> None:
    case.weight.untyped_storage().copy_((-2 * case.weight.detach()).untyped_storage())


def _pruned(case: Case) -> None:
    case.weight.data[case.weight.data.abs() < case.weight.data.abs().median()] = 0


def _hooked(case: Case) -> None:
    """A write in a forward pre-hook, as legacy weight normalisation does."""
    layer = next(module for module in case.model.modules() if isinstance(module, nn.Linear))

    def halve(module, args):
        module.weight.data.mul_(0.5)

    layer.register_forward_pre_hook(halve)


def _out(case: Case) -> None:
    with torch.no_grad():
        torch.mul(case.weight, -2, out=case.weight)


def _saved_and_loaded(case: Case) -> None:
    file = io.BytesIO()
    torch.save(case.model.state_dict(), file)
    case.backward()
    torch.optim.SGD(case.model.parameters(), lr=1.0).step()
    case.model(case.x)
    file.seek(0)
    case.model.load_state_dict(torch.load(file))


WAYS: dict[str, Callable[[Case], None]] = {
    "mul_ under no_grad": _no_grad(lambda w: w.mul_(-2)),
    "clamp_": _no_grad(lambda w: w.clamp_(-0.01, 0.01)),
    "nn.init": _no_grad(lambda w: nn.init.normal_(w, std=3)),
    "copy_ into a view": _no_grad(lambda w: w[0].copy_(w[1] * 5)),
    "index_copy_": _no_grad(lambda w: w.index_copy_(0, torch.tensor([0, 1]), w[[1, 0]].clone())),
    "masked_fill_": _no_grad(lambda w: w.masked_fill_(w > 0, 0.0)),
    "F.normalize into it": _no_grad(lambda w: w.copy_(F.normalize(w))),
    "renorm_": _no_grad(lambda w: w.renorm_(2, 0, 0.01)),
    "foreach": _no_grad(lambda w: torch._foreach_mul_([w], -2)),
    "out=": _out,
    "inference_mode": _inference,
    "numpy": _numpy,
    "storage": _storage,
    "one element": _one_element,
    "half an FP8 step": _half_an_ulp_of_fp8,
    "two columns change places": _two_values_change_places,
    "pruning": _pruned,
    ".data =": _set_data,
    "transposed": _transposed,
    "another memory layout": _transposed_memory,
    "swap_tensors": _swapped,
    "set_": _set,
    "a new Parameter": _new_parameter,
    "vector_to_parameters": _vector,
    "load_state_dict of a submodule": _submodule_state,
    "load_state_dict(assign=True)": _assigned_state,
    "save, train, load": _saved_and_loaded,
    "the optimizer's step": _managed_step,
    "fused AdamW": _step_of(lambda c: torch.optim.AdamW(c.model.parameters(), lr=0.1, fused=True)),
    "foreach SGD": _step_of(lambda c: torch.optim.SGD(c.model.parameters(), lr=1.0, foreach=True)),
    "LBFGS": _lbfgs,
    "SAM": _sam,
    "two optimizers": _two_optimizers,
    "a forward pre-hook": _hooked,
}
