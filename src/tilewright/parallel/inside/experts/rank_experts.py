"""A model of which a rank holds some of the experts of each layer, under their names in the whole one.

    hold_experts(model, world)   # on meta: experts of other ranks are let go before they take memory
    shard(model, ...)            # these are sharded over the ranks that hold the same ones, the rest over all shards

Router, shared experts and everything else stay as they are. Ranks of `ep` read other rows, and send them to each other
(`exchange`); ranks of `efsdp` hold shards of the same experts, copies (`dp_replicate`) the same ones.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilewright.core.config.sections.expert_conflicts import uneven_experts
from tilewright.core.config.sections.parallel import DispatchName
from tilewright.core.errors import ConfigError
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.moe import MoE
from tilewright.parallel.inside.experts.exchange import ExpertExchange
from tilewright.parallel.inside.experts.placement import Orders, by_rank, orders_of, usual
from tilewright.parallel.inside.experts.stacked import spread_stack, stacked_experts
from tilewright.parallel.launch import EXPERTS
from tilewright.parallel.pipeline.hf_stages import StagedHF
from tilewright.parallel.pipeline.stage_base import HeldLayers
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


def hold_experts(
    model: nn.Module,
    world: World,
    dispatch: DispatchName = "stream",
    order: Sequence[int] = (),
    *,
    redundant: int = 0,
) -> None:
    """Hold some experts on a rank: free those that other ranks hold, in place, and let each layer send rows to where
    their experts are.

    Args:
        model: converted, on meta, or with memory in tests.
        world: with `ep` ranks that hold other experts.
        dispatch: what rows travel to them as.
        order: of the experts of each layer, one after another (`placement`); empty: the usual one.
        redundant: how many more experts a rank holds, which others hold too.

    Raises:
        ConfigError: it has no experts, or so many that they do not come out even (`check_experts`), or an order that
            is none of all of them.
        HardwareError: this torch is too old for it.
    """
    EXPERTS.check()
    if not isinstance(model, Decoder):
        _hold_stacked(model, world, dispatch)
        return
    check_experts(model.config.num_experts, world.sizes.ep, redundant)
    mesh = world.expert_fsdp_mesh
    assert mesh is not None, "ep > 1 and tp > 1 have a second mesh"
    whole = model.config.num_layers - model.config.num_dense_layers
    orders = check_order(order, model.config.num_experts, whole, world.sizes.ep, redundant)
    for place, layer in zip(places_of_mixtures(model), mixtures(model), strict=True):
        own, kernels = orders[place], layer.gate.kernels
        how = {"dispatch": dispatch, "kernels": kernels}
        trained = any(param.requires_grad for param in layer.experts.parameters())
        exchange = ExpertExchange(world.experts, layer.num_experts, order=own, trained=trained, **how)
        held = {number: layer.experts[number] for number in exchange.held}
        layer.experts = HeldExperts(held, layer.num_experts, mesh)
        layer.exchange = exchange if world.experts.size > 1 else None


def _hold_stacked(model: nn.Module, world: World, dispatch: DispatchName) -> None:
    """Hold some stacked experts of a Hugging Face model on a rank. A stage may have no layer with some."""
    blocks = model.view.blocks if isinstance(model, StagedHF) else (model,)
    found = {module: name for block in blocks for name, module in stacked_experts(block)}
    mesh, ep, shards = world.expert_fsdp_mesh, world.sizes.ep, world.sizes.dp_shard * world.sizes.tp
    if not found:
        raise ConfigError(
            "Model whose experts cannot be spread",
            got=f"{type(model).__name__}, parallel.ep = {ep}",
            need="tilewright's own decoder, or experts of transformers that are stacked: one tensor per matrix",
            try_="--parallel.ep 1: shards (FSDP2) take any model",
            where="parallel.ep",
        )
    assert mesh is not None, "ep > 1 and tp > 1 have a second mesh"
    assert world.expert_mesh is not None, "that is it"
    for module, name in found.items():
        number = module.num_experts
        assert isinstance(number, int), "that is how it was found"
        if ep > 1:
            check_experts(number, ep)
        if ep > 1 and number % shards:
            cut = f" x tp = {world.sizes.tp}" if world.sizes.tp > 1 else ""
            even = [size for size in range(1, world.sizes.dp_shard + 1) if number % (size * world.sizes.tp) == 0]
            raise ConfigError(
                "Stacked experts that do not come out even over the shards",
                got=f"{number} experts in {name}, parallel.dp_shard = {world.sizes.dp_shard}{cut}",
                need="a dp_shard (x tp) that divides the number of experts: each shard has whole ones",
                try_=f"--parallel.dp_shard {max(even)}" if even else "--parallel.ep 1",
                where="parallel.dp_shard",
            )
    for _, module in stacked_experts(model):
        if ep == 1:  # whole ones, on ranks that send other tokens of the same rows through them
            module.sharded_over = mesh  # type: ignore[assignment]
            continue
        number = module.num_experts
        assert isinstance(number, int), "that is how it was found"
        exchange = ExpertExchange(world.experts, number, dispatch=dispatch)
        spread_stack(module, exchange, world.expert_mesh["ep"], mesh)


def mixtures(model: nn.Module) -> Iterator[MoE]:
    """The layers of experts of which a rank holds some."""
    return (module for module in model.modules() if isinstance(module, MoE))


def places_of_mixtures(model: Decoder) -> list[int]:
    """The places of this rank's layers of experts, among those of the whole model."""
    dense = model.config.num_dense_layers
    return [int(number) - dense for number, block in model.model.layers.named_children() if block.is_moe]


def has_experts(model: nn.Module) -> bool:
    """True if a model has experts that ranks can hold apart, its own or stacked ones."""
    return any(mixtures(model)) or any(stacked_experts(model))


def expert_meshes(model: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """Parameters of a rank's experts that are sharded over another mesh than the rest, with that mesh."""
    meshes = {module: getattr(module, "sharded_over", None) for module in model.modules()}
    return {param: mesh for module, mesh in meshes.items() if mesh is not None for param in module.parameters()}


def check_order(order: Sequence[int], num_experts: int, layers: int, ep: int, redundant: int = 0) -> Orders:
    """Check the order of experts on ranks: of each layer's, the usual one where none is given.

    Raises:
        ConfigError: it does not name each expert of each layer, or not as many as processes hold, or one of a process
            twice, or those of a process not in the order of their numbers.

    Example:
        >>> check_order((0, 2, 1, 3), 4, 1, 2), check_order((), 4, 2, 2)
        (((0, 2, 1, 3),), ((0, 1, 2, 3), (0, 1, 2, 3)))
    """
    if not order:
        return (usual(num_experts, ep, redundant),) * layers
    number = num_experts + ep * redundant
    found = orders_of(order, number)
    sound = len(order) == layers * number and all(
        all(list(held) == sorted(set(held)) for held in by_rank(one, ep)) and set(one) == set(range(num_experts))
        for one in found
    )
    if not sound:
        copies = f", and parallel.redundant_experts = {redundant} for each of {ep} processes" if redundant else ""
        raise ConfigError(
            "Order of experts that is none of this model's",
            got=f"{len(order)} numbers in parallel.expert_order",
            need=f"0 to {num_experts - 1} for each of {layers} layers{copies}; those of a process once, in their order",
            try_="--parallel.expert_order [], which keeps the order of their numbers",
            where="parallel.expert_order",
        )
    return found


def check_experts(num_experts: int, ep: int, redundant: int = 0) -> None:
    """Check what a number of experts needs to be spread over ranks.

    Raises:
        ConfigError: there are none, or they do not come out even, or other processes have fewer than `redundant`.

    Example:
        >>> check_experts(8, 4)
    """
    for found in uneven_experts(num_experts, ep, redundant):
        raise ConfigError(found.what, got=found.got, need=found.need, try_=found.try_, where=found.fields[0])
