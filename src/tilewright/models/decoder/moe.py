"""Mixture of experts as in DeepSeek-V3: sigmoid router, group-limited choice, shared experts, no dropped tokens.

Load is balanced without an auxiliary loss: a bias that only takes part in the choice (never in the weight of an
expert) is moved after each step against the sign of the expert's load error. `MoE.forward` returns the load as a
value instead of counting it on the side, so recomputing a layer in backward counts nothing twice;
`decoder.Decoder` adds it up and sets `Router.rebalanced`.

Parameter names are those of Hugging Face's DeepSeek-V3 files.

Legend: N tokens  D model width  E experts  K experts a token  G groups  B rows  S positions.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.layers import MLP, StreamSlices
from tilewright.ops.backends.ref.adam import hash_of
from tilewright.ops.base.documents import Segments, segments_of
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.kernels import Kernels


class RunExperts(Protocol):
    """Some experts, each on its rows, with the keys of these where rows have some."""

    def __call__(self, rows: Sequence[Tensor], keys: Sequence[Tensor] | None = None, /) -> list[Tensor]:
        """Run experts (MoE): rows [n, D] and keys [n] of each -> its result [n, D]."""
        ...


RunTokens = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Tokens, each through its experts: `MoE.run_experts`."""


class Router(nn.Module):
    """Which experts a token goes to, and with what weight. Always in FP32.

    scores = sigmoid(x W^T); the choice is by scores + bias: the `num_limited_groups` groups with the largest sum of
    their two best experts, then the best K experts in them. Weights are the chosen scores without the bias,
    normalised to sum to `routed_scaling`.

    See: DeepSeek-V3 report, section 2.1.2, equations 12-16, and "Auxiliary-Loss-Free Load Balancing".
    """

    e_score_correction_bias: Tensor
    """[E] FP32."""

    def __init__(self, config: DecoderConfig, kernels: Kernels):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.num_chosen = config.num_experts_per_token
        self.num_groups, self.num_limited_groups = config.num_expert_groups, config.num_limited_groups
        self.routed_scaling = config.routed_scaling
        self.balance_rate = config.balance_rate
        self.kernels = kernels
        self.choices: Callable[[Callable[[], Tensor]], Tensor] | None = None
        """Takes what the router would choose, and says what it chooses: the same again when a layer is recomputed.
        Set around a layer, by `SameChoices` and `memory.layer_major.replay_random`."""

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens to experts (MoE): x [N, D] -> (weights [N, K] FP32, experts [N, K] int64)."""
        scores_NE = self.kernels.linear(x_ND.float(), self.weight).sigmoid()
        if self.choices is None:
            experts_NK = self._choose(scores_NE)
        else:
            experts_NK = self.choices(lambda: self._choose(scores_NE))
        weights_NK = scores_NE.gather(1, experts_NK)
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * self.routed_scaling, experts_NK

    def _choose(self, scores_NE: Tensor) -> Tensor:
        choice_NE = scores_NE.detach() + self.e_score_correction_bias
        if self.num_limited_groups < self.num_groups:
            choice_NE = self._limit_groups(choice_NE)
        return choice_NE.topk(self.num_chosen, dim=-1, sorted=False).indices

    def _limit_groups(self, choice_NE: Tensor) -> Tensor:
        """Put minus infinity on experts outside of the groups that a token may be routed to."""
        choice_NGE = choice_NE.unflatten(-1, (self.num_groups, -1))
        best = choice_NGE.topk(min(2, choice_NGE.shape[-1]), dim=-1).values.sum(-1)
        groups = best.topk(self.num_limited_groups, dim=-1, sorted=False).indices
        allowed_NG = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        return choice_NGE.masked_fill(~allowed_NG[..., None], float("-inf")).flatten(1)

    @torch.no_grad()
    def rebalanced(self, load_E: Tensor) -> Tensor:
        """The bias of a MoE router, rebalanced: raised by `balance_rate` for experts with less than the mean load,
        lowered for the others."""
        return self.e_score_correction_bias + self.balance_rate * torch.sign(load_E.mean() - load_E)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.num_chosen} of {self.weight.shape[0]} experts"


class SameChoices:
    """A layer that may run twice, for backward again: its router chooses what it has chosen the first time.

    Scores that come out in another last bit would send a token to another expert: other sizes of what ranks exchange,
    and of what backward has kept.

    Args:
        router: of the layer.
        function: the layer.
    """

    def __init__(self, router: Router, function: Callable[..., Any]) -> None:
        self._router, self._function = router, function
        self._experts_NK: Tensor | None = None

    def __call__(self, *args: Any) -> Any:
        """Run function(*args) a second time with the same choices of experts."""
        before = self._router.choices

        def choice(choose: Callable[[], Tensor]) -> Tensor:
            if self._experts_NK is None:
                self._experts_NK = choose() if before is None else before(choose)
            return self._experts_NK

        self._router.choices = choice
        try:
            return self._function(*args)
        finally:
            self._router.choices = before


class MoE(nn.Module):
    """Routed experts plus shared experts that every token passes.

    Tokens are sorted by expert and each expert runs once on its own rows: no capacity limit, nothing dropped. The loop
    reads the row counts on the host, so a compiled layer keeps it outside its graph.
    """

    def __init__(self, config: DecoderConfig, kernels: Kernels):
        super().__init__()
        self.gate = Router(config, kernels)
        self.num_experts = config.num_experts
        """Those of all ranks; `experts` may be some of them."""
        self.experts = nn.ModuleList(MLP(config.dim, config.expert_dim, kernels) for _ in range(config.num_experts))
        self.shared_experts = MLP(config.dim, config.shared_width, kernels) if config.num_shared_experts else None
        self.expert_runner: Callable[[Sequence[Tensor], Sequence[nn.Module]], list[Tensor]] | None = None
        """Runs all experts at once, each on its rows; None runs one after another. Set by `precision.convert`."""
        self.exchange: Callable[..., Tensor] | None = None
        """Takes rows sorted by expert, their number for each expert, what runs the experts that are here, and the keys
        of rows that have some; gives what the experts make of the rows. None where all are here. Set by
        `parallel.inside.experts`."""
        self.divided: Callable[[RunTokens, Tensor, Tensor, Tensor], Tensor] | None = None
        """Takes `run_experts` and what it takes, and gives the same; the experts see some of the tokens on each of
        the ranks that have the same ones. None where other ranks have others. Set by `parallel.inside.tensor`."""
        self.slices: StreamSlices | None = None
        """Where this rank's tokens are some positions of the rows. Set by `parallel.inside.tensor`."""
        self.draws = False
        """Whether adapters of experts drop inputs in training: by keys of the rows then, which go with these to where
        their experts are. Set by `precision.lora`."""

    def forward(self, x_BSD: Tensor, segments: Segments = None) -> tuple[Tensor, Tensor]:
        """Run a mixture of experts (MoE): x [B, S, D] -> (out [B, S, D], load [E] FP32: tokens sent to each expert,
        padding left out)."""
        x_ND = x_BSD.flatten(0, 1)
        weights_NK, experts_NK = self.gate(x_ND)
        run: Callable[..., Tensor] = self.run_experts
        if self.divided is not None:
            run = functools.partial(self.divided, self.run_experts)
        if self.draws and self.slices is not None:
            run = functools.partial(run, token_N=self.slices.token_numbers(len(x_BSD), x_BSD.device))
        if torch.compiler.is_compiling():
            from tilewright.ops.base.opaque import eager  # its decorators take seconds to import

            out_ND = eager(run, x_ND, weights_NK, experts_NK)
        else:
            out_ND = run(x_ND, weights_NK, experts_NK)
        if self.shared_experts is not None:
            out_ND = out_ND + self.shared_experts(x_ND)
        return out_ND.view_as(x_BSD), self._load(experts_NK, self._documents(x_BSD, segments))

    def _documents(self, x_BSD: Tensor, segments: Segments) -> Tensor | None:
        segments_BS = segments_of(segments)
        return segments_BS if self.slices is None else self.slices.documents_of(segments_BS, len(x_BSD), x_BSD.device)

    def run_experts(
        self, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, token_N: Tensor | None = None
    ) -> Tensor:
        """Run each token's experts (MoE), and sum their weighted results. Not for compiled code: shapes depend on the
        data.

        Args:
            x_ND: tokens.
            weights_NK, experts_NK: of each.
            token_N: their numbers in the micro-batch; None: it has no others.
        """
        num_chosen = experts_NK.shape[1]
        flat = experts_NK.flatten()
        order = flat.argsort(stable=True)
        counts_E = torch.bincount(flat, minlength=self.num_experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)

        copies = x_ND.unsqueeze(1).expand(-1, num_chosen, -1).flatten(0, 1)
        rows_PD = permuted(copies, order, inverse)
        keys = (self._keys(experts_NK, token_N).flatten()[order],) if self.draws and self.training else ()
        run = functools.partial(self._run_held, len(flat) // len(self.experts))
        if self.exchange is None:
            counts = counts_E.tolist()
            out_PD = torch.cat(run(*(of_rows.split(counts) for of_rows in (rows_PD, *keys))))
        else:
            out_PD = self.exchange(rows_PD, counts_E, run, *keys)
        out_NKD = permuted(out_PD, inverse, order).unflatten(0, (-1, num_chosen))
        return (out_NKD * weights_NK.unsqueeze(-1)).sum(1).to(x_ND.dtype)

    def _keys(self, experts_NK: Tensor, token_N: Tensor | None) -> Tensor:
        """Draw a random int32 key [N, K] for dropout, for each token and expert. It is a function of one draw, the
        token's number and the expert: the same on whatever rank the two meet, and whatever other tokens do."""
        num_tokens, device = len(experts_NK), experts_NK.device
        draw = torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=device)
        numbers_N = torch.arange(num_tokens, device=device) if token_N is None else token_N
        return hash_of((numbers_N[:, None] * self.num_experts + experts_NK).to(torch.int32), draw)

    def _run_held(
        self, mean_rows: int, rows: Sequence[Tensor], keys: Sequence[Tensor] | None = None, /
    ) -> list[Tensor]:
        """Run the held experts (MoE) that are here, each on its rows. `mean_rows`: of one, if all ranks' experts had as
        many."""
        if self.expert_runner is not None and self.expert_runner.fits(self.experts):
            return self.expert_runner(rows, list(self.experts))
        return self._run_one_by_one(mean_rows, rows, keys)

    def _run_one_by_one(self, mean_rows: int, rows: Sequence[Tensor], keys: Sequence[Tensor] | None) -> list[Tensor]:
        multiple = _row_multiple(mean_rows, rows[0].device.type)
        # With gradients every expert runs, on no rows if it must: its gradient is then zero, not missing. Where ranks
        # have other experts or other tokens all may be without rows here, and the result's dtype is theirs still.
        all_run = torch.is_grad_enabled() or self.exchange is not None or self.divided is not None
        return [
            _run_padded(expert, x, multiple, key)
            for expert, x, key in zip(self.experts, rows, keys or [None] * len(rows), strict=True)
            if len(x) or all_run
        ]

    def _load(self, experts_NK: Tensor, segments_BS: Tensor | None) -> Tensor:
        load_E = torch.zeros(self.num_experts, dtype=torch.float32, device=experts_NK.device)
        if segments_BS is None:
            ones_NK = torch.ones_like(experts_NK, dtype=torch.float32)
        else:
            ones_NK = (segments_BS >= 0).flatten()[:, None].expand_as(experts_NK).float()
        return load_E.scatter_add_(0, experts_NK.flatten(), ones_NK.flatten())


def _row_multiple(mean_rows: int, device_type: str) -> int:
    """The multiple to which the rows of an expert are padded: about a quarter of the mean load on a CPU, else 1.

    oneDNN prepares and keeps code for every new shape (0.25 MB and a millisecond each), and unpadded loads are a new
    shape each time: memory grew by 100 MiB per step, and half of the time went there. So the mean is that of even
    routing: what came to this rank is another number in each layer and step, and multiples of it new shapes again.
    """
    return max(16, -(-mean_rows // 64) * 16) if device_type == "cpu" else 1


def _run_padded(expert: nn.Module, x_ND: Tensor, multiple: int, key_N: Tensor | None = None) -> Tensor:
    """Run an expert (MoE) padded: expert(x), computed with zero rows at the end up to a multiple."""
    num_rows = len(x_ND)
    if not num_rows:  # what is kept of a view of no rows is all rows
        x_ND = x_ND.clone()
    missing = -num_rows % multiple
    with _keyed(expert, None if key_N is None else F.pad(key_N, (0, missing))):
        return expert(F.pad(x_ND, (0, 0, 0, missing)))[:num_rows] if missing else expert(x_ND)


@contextmanager
def _keyed(expert: nn.Module, key_N: Tensor | None) -> Iterator[None]:
    """Inside, each layer of an expert (MoE) has keys of its own of the rows that it runs on (`row_keys`)."""
    layers: list[Any] = []
    if key_N is not None:
        layers += expert.children()
        for number, layer in enumerate(layers):
            layer.row_keys = hash_of(key_N, number)
    try:
        yield
    finally:
        for layer in layers:
            del layer.row_keys


def permuted(x_ND: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows of MoE in another order. `inverse` is the order that takes them back."""
    return x_ND.index_select(0, order) if in_func_transform() else _Permute.apply(x_ND, order, inverse)


class _Permute(torch.autograd.Function):
    """Rows in another order. Backward gathers by the inverse; that of `x[order]` would scatter-add row by row."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x_ND.index_select(0, order)

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad_ND.index_select(0, inverse), None, None
