"""A decoder of which a rank holds some of the experts of each layer, under their names in the whole one.

    hold_experts(model, world)   # on meta: experts of other ranks are let go before they take memory
    shard(model, ...)            # these are sharded over the ranks that hold the same ones, the rest over all shards

Router, shared experts and everything else stay as they are. Ranks of `ep` read other rows, and send them to each other
(`exchange`); ranks of `efsdp` hold shards of the same experts, copies (`dp_replicate`) the same ones.
"""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilewright.core.config.sections.expert_conflicts import uneven_experts
from tilewright.core.errors import ConfigError
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.moe import MoE
from tilewright.parallel.inside.experts.exchange import ExpertExchange
from tilewright.parallel.launch import EXPERTS
from tilewright.parallel.pipeline.stages import HeldLayers
from tilewright.parallel.world import World


class HeldExperts(HeldLayers):
    """Some of the experts of a layer, under their numbers in the whole.

    Args:
        experts: by number.
        num_in_whole: experts of the layer on all ranks; see `models.base.routers.num_experts`.
        mesh: over which FSDP2 shards them.
    """

    def __init__(self, experts: Mapping[int, nn.Module], num_in_whole: int, mesh: DeviceMesh) -> None:
        super().__init__(experts)
        self.num_in_whole, self.mesh = num_in_whole, mesh


def hold_experts(model: nn.Module, world: World) -> None:
    """Let go of the experts that other ranks hold, in place, and let each layer send rows to where their experts are.

    Args:
        model: converted, on meta, or with memory in tests.
        world: with `ep` ranks that hold other experts.

    Raises:
        ConfigError: it has no experts, or so many that they do not come out even; see `check_experts`.
        HardwareError: this torch is too old for it.
    """
    EXPERTS.check()
    if not isinstance(model, Decoder):
        raise ConfigError(
            "Model whose experts cannot be spread yet",
            got=f"{type(model).__name__}, parallel.ep = {world.sizes.ep}",
            need="tilewright's own decoder",
            try_="--parallel.ep 1: shards (FSDP2) take any model",
            where="parallel.ep",
        )
    check_experts(model.config.num_experts, world.sizes.ep)
    mesh = world.expert_fsdp_mesh
    assert mesh is not None, "ep > 1 and tp > 1 have a second mesh"
    for layer in mixtures(model):
        exchange = ExpertExchange(world.experts, layer.num_experts, world.traffic)
        held = {number: layer.experts[number] for number in exchange.held}
        layer.experts = HeldExperts(held, layer.num_experts, mesh)
        layer.exchange = exchange if world.experts.size > 1 else None


def mixtures(model: nn.Module) -> Iterator[MoE]:
    """The layers of experts."""
    return (module for module in model.modules() if isinstance(module, MoE))


def expert_meshes(model: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """Parameters that are sharded over another mesh than the rest, with that mesh."""
    return {
        param: module.mesh
        for module in model.modules()
        if isinstance(module, HeldExperts)
        for param in module.parameters()
    }


def check_experts(num_experts: int, ep: int) -> None:
    """What a number of experts takes.

    Raises:
        ConfigError: there are none, or they do not come out even.

    Example:
        >>> check_experts(8, 4)
    """
    for found in uneven_experts(num_experts, ep):
        raise ConfigError(found.what, got=found.got, need=found.need, try_=found.try_, where="parallel.ep")
