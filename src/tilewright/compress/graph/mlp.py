"""Feed-forward layers of an exported graph: SwiGLU, and experts that all compute every token.

Which rows an expert gets depends on the data, and no graph holds that. Here each expert runs on all tokens and the
router's weights, zero for experts that were not chosen, sum the outputs: the same result for E / K of the work.

Legend: N tokens  D model width  E experts  K experts per token.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.compress.graph.graph_layers import join
from tilewright.models.decoder.layers import MLP
from tilewright.models.decoder.moe import MoE, Router


class GraphMLP(nn.Module):
    """`models.decoder.layers.MLP` with gate and up in one matrix."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_up_proj = join([mlp.gate_proj, mlp.up_proj])
        self.down_proj = join([mlp.down_proj])

    def forward(self, x: Tensor) -> Tensor:
        """Run an MLP in a graph: x [..., D] -> [..., D]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GraphRouter(nn.Module):
    """`models.decoder.moe.Router`: the weight of each expert for each token."""

    bias: Tensor

    def __init__(self, router: Router):
        super().__init__()
        self.weight = nn.Parameter(router.weight.detach().float(), requires_grad=False)
        self.register_buffer("bias", router.e_score_correction_bias.detach().clone())
        self.num_chosen, self.routed_scaling = router.num_chosen, router.routed_scaling
        self.num_groups, self.num_limited_groups = router.num_groups, router.num_limited_groups

    def forward(self, x_ND: Tensor) -> Tensor:
        """Run the router of experts in a graph: x [N, D] -> weights [N, E], zero where an expert is not chosen."""
        scores_NE = (x_ND @ self.weight.T).sigmoid()
        choice_NE = scores_NE + self.bias
        if self.num_limited_groups < self.num_groups:
            choice_NGE = choice_NE.unflatten(-1, (self.num_groups, -1))
            best = choice_NGE.topk(min(2, choice_NGE.shape[-1]), dim=-1).values.sum(-1)
            allowed_NG = _chosen(best, self.num_limited_groups)
            choice_NE = (choice_NGE + torch.log(allowed_NG)[..., None]).flatten(1)  # log 0 is minus infinity
        weights_NE = scores_NE * _chosen(choice_NE, self.num_chosen)
        return weights_NE / (weights_NE.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling


def _chosen(score: Tensor, count: int) -> Tensor:
    """Mark the experts that a graph's router chooses: 1 at the `count` largest of each row, 0 elsewhere."""
    return torch.zeros_like(score).scatter(-1, score.topk(count, dim=-1).indices, 1.0)


class GraphExperts(nn.Module):
    """`models.decoder.moe.MoE`, computed densely."""

    def __init__(self, moe: MoE):
        super().__init__()
        self.gate = GraphRouter(moe.gate)
        self.experts = nn.ModuleList(GraphMLP(cast(MLP, expert)) for expert in moe.experts)
        self.shared_experts = GraphMLP(moe.shared_experts) if moe.shared_experts is not None else None

    def forward(self, x_1SD: Tensor) -> Tensor:
        """Run an MLP with experts in a graph: x [1, S, D] -> [1, S, D]."""
        x_ND = x_1SD[0]
        weights_NE = self.gate(x_ND)
        out_ND: Any = sum(weights_NE[:, e : e + 1] * expert(x_ND) for e, expert in enumerate(self.experts))
        if self.shared_experts is not None:
            out_ND = out_ND + self.shared_experts(x_ND)
        return out_ND[None]
