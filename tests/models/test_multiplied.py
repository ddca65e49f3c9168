"""What a module does with its own parameters: a matmul's weight, or not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilewright.models.base.own_weights import may_multiply


def helper(x, weight):
    return x @ weight


class Uses(nn.Module):
    """One parameter for each way."""

    def __init__(self):
        super().__init__()
        for name in (*WEIGHTS, *OTHERS):
            setattr(self, name, nn.Parameter(torch.randn(4, 4)))

    def forward(self, x):
        y = F.linear(x, self.linear_weight) + self.added
        y = torch.bmm(y[None], self.stacked[None].transpose(1, 2))[0] * torch.exp(self.decay.float())
        y = y @ self.operator + self.table[torch.arange(4)]
        w = self.cast.to(y.dtype).T
        y = self.helps(y.matmul(w), self.handed)
        first, second = self.parts.chunk(2)
        y = torch.addmm(y, y, torch.cat((first, second))) if len(y) > 100 else F.linear(y, first)
        y = helper(y, self.given) + torch.cat((self.catted[:2], self.catted[2:]))
        late = x
        for row in range(2):
            y = y @ late if row else y
            late = self.looped[0:4]
        return torch.matmul(torch.softmax(y * self.scale, -1), x)

    def helps(self, x, weight):
        return torch.einsum("ij,kj->ik", x, weight)


WEIGHTS = ("linear_weight", "stacked", "operator", "cast", "handed", "parts", "given", "looped")
OTHERS = ("added", "decay", "table", "catted", "scale")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_products(name):
    assert may_multiply(Uses, name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_meets_elements(name):
    assert not may_multiply(Uses, name)


def test_what_the_source_does_not_show_may_be_multiplied():
    class Outside(nn.Module):
        """Another module hands it its own weight."""

        def forward(self, x, weight):
            return x.matmul(weight)

    assert may_multiply(Outside, "weight_of_mine")
    namespace = {}
    exec("def forward(self, x):\n    return x @ self.weight.exp()", namespace)
    assert may_multiply(type("Typed", (nn.Module,), namespace), "weight")
    assert not may_multiply(nn.Embedding, "weight")


@pytest.mark.parametrize(
    ("path", "multiplied"),
    [
        ("mamba.modeling_mamba.MambaMixer.A_log", False),
        ("maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention.relative_position_bias_table", False),
        ("vit.modeling_vit.ViTEmbeddings.position_embeddings", False),
        ("jetmoe.modeling_jetmoe.JetMoeParallelExperts.weight", True),
        ("llama4.modeling_llama4.Llama4TextExperts.down_proj", True),
        ("dbrx.modeling_dbrx.DbrxExpertGLU.w1", True),
        ("mixtral.modeling_mixtral.MixtralTopKRouter.weight", True),
    ],
)
def test_classes_of_transformers(path, multiplied):
    import importlib

    source, name, parameter = path.rsplit(".", 2)
    kind = getattr(importlib.import_module(f"transformers.models.{source}"), name)
    assert may_multiply(kind, parameter) is multiplied
