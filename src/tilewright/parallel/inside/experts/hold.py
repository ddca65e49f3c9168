"""A model of which a rank holds some of the experts of each layer, under their names in the whole one.

    hold_experts(model, world)   # on meta: experts of other ranks are let go before they take memory
    shard(model, ...)            # these are sharded over the ranks that hold the same ones, the rest over all shards

Router, shared experts and everything else stay as they are. Ranks of `ep` read other rows, and send them to each other
(`exchange`); ranks of `efsdp` hold shards of the same experts, copies (`dp_replicate`) the same ones.
"""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilewright.core.config.sections.expert_conflicts import uneven_experts
from tilewright.core.config.sections.parallel import DispatchName
from tilewright.core.errors import ConfigError
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.moe import MoE
from tilewright.parallel.inside.experts.exchange import ExpertExchange
from tilewright.parallel.inside.experts.stacked import spread_stack, stacked_experts
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
        self.num_in_whole, self.sharded_over = num_in_whole, mesh


def hold_experts(model: nn.Module, world: World, dispatch: DispatchName = "stream") -> None:
    """Let go of the experts that other ranks hold, in place, and let each layer send rows to where their experts are.

    Args:
        model: converted, on meta, or with memory in tests.
        world: with `ep` ranks that hold other experts.
        dispatch: what rows travel to them as.

    Raises:
        ConfigError: it has no experts, or so many that they do not come out even; see `check_experts`.
        HardwareError: this torch is too old for it.
    """
    EXPERTS.check()
    if not isinstance(model, Decoder):
        _hold_stacked(model, world, dispatch)
        return
    check_experts(model.config.num_experts, world.sizes.ep)
    mesh = world.expert_fsdp_mesh
    assert mesh is not None, "ep > 1 and tp > 1 have a second mesh"
    for layer in mixtures(model):
        exchange = ExpertExchange(world.experts, layer.num_experts, dispatch=dispatch, kernels=layer.gate.kernels)
        held = {number: layer.experts[number] for number in exchange.held}
        layer.experts = HeldExperts(held, layer.num_experts, mesh)
        layer.exchange = exchange if world.experts.size > 1 else None


def _hold_stacked(model: nn.Module, world: World, dispatch: DispatchName) -> None:
    """The same of a Hugging Face model, whose experts are stacked."""
    found = list(stacked_experts(model))
    mesh, ep, shards = world.expert_fsdp_mesh, world.sizes.ep, world.sizes.dp_shard
    if not found:
        raise ConfigError(
            "Model whose experts cannot be spread",
            got=f"{type(model).__name__}, parallel.ep = {ep}",
            need="tilewright's own decoder, or experts of transformers that are stacked: one tensor per matrix",
            try_="--parallel.ep 1: shards (FSDP2) take any model",
            where="parallel.ep",
        )
    assert mesh is not None, "ep > 1 has a second mesh"
    assert world.expert_mesh is not None, "that is it"
    for name, module in found:
        number = module.num_experts
        assert isinstance(number, int), "that is how it was found"
        check_experts(number, ep)
        if number % shards:
            raise ConfigError(
                "Stacked experts that do not come out even over the shards",
                got=f"{number} experts in {name}, parallel.dp_shard = {shards}",
                need="a dp_shard that divides the number of experts: each shard has whole ones",
                try_=f"--parallel.dp_shard {max(size for size in range(1, shards + 1) if number % size == 0)}",
                where="parallel.dp_shard",
            )
        exchange = ExpertExchange(world.experts, number, dispatch=dispatch)
        spread_stack(module, exchange, world.expert_mesh["ep"], mesh)


def mixtures(model: nn.Module) -> Iterator[MoE]:
    """The layers of experts."""
    return (module for module in model.modules() if isinstance(module, MoE))


def expert_meshes(model: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """Parameters that are sharded over another mesh than the rest, with that mesh."""
    meshes = {module: getattr(module, "sharded_over", None) for module in model.modules()}
    return {param: mesh for module, mesh in meshes.items() if mesh is not None for param in module.parameters()}


def check_experts(num_experts: int, ep: int) -> None:
    """What a number of experts takes.

    Raises:
        ConfigError: there are none, or they do not come out even.

    Example:
        >>> check_experts(8, 4)
    """
    for found in uneven_experts(num_experts, ep):
        raise ConfigError(found.what, got=found.got, need=found.need, try_=found.try_, where="parallel.ep")
