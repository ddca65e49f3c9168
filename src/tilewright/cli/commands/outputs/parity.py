"""`tilewright doctor --parallel`: a recipe's model, tiny, trained on several ranks and on one, and what differs.

Each side is a process of its own (several for the ranks), which trains three steps on the same samples and writes the
gradients that each update saw, and its weights after the last. Forward and backward passes are the same on both sides,
row by row; what differs is the order of sums (`parity_limits`). What would make much of a last bit is held
(`parity_held`).
"""

import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from math import hypot
from pathlib import Path
from subprocess import Popen
from typing import Any

from tilewright.cli.commands.outputs.parity_limits import ParityLimits, in_stacks, limits_of
from tilewright.core import env
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import Loaded, load_recipe, write_run_toml
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.expert_conflicts import expert_conflicts
from tilewright.core.config.sections.sync_conflicts import sync_conflicts
from tilewright.core.config.sections.tensor_conflicts import tensor_conflicts
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.core.log import say
from tilewright.core.subprocess_call import answer, answer_error, call_module
from tilewright.parallel.mesh import DATA_AXES, MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline

STEPS = 3
_AXES = ("pp", *DATA_AXES, "tp", "ep")
PATIENCE_S = 36.0
"""For which ranks wait for each other: with what follows, a rank that hangs is named within a minute."""
GRACE_S = 5.0
"""Since a rank has failed, after which the others are ended."""


@dataclass(frozen=True)
class Gap:
    """One number, or tensor, of both sides."""

    kind: str
    """loss, gradient or weight."""
    name: str
    error: float
    """Norm of the difference over the norm on one process."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if a gap of the parity check is within the tolerance."""
        return self.error <= self.tolerance


def parse_sizes(text: str) -> MeshSizes:
    """Read the ranks of a parity check by axis, as in `dp_shard=2,dp_replicate=2` or `pp=2,dp_shard=2`. With `ep=2`
    alone the same ranks are shards.

    Raises:
        ConfigError: something else.

    Example:
        >>> parse_sizes("dp_shard=2").dp_shard, parse_sizes("ep=4").experts["efsdp"]
        (2, 1)
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _AXES or not value.isdecimal() or not int(value):
            raise ConfigError(
                "Mesh that cannot be read",
                got=text,
                need=f"numbers of processes: {'=N, '.join(_AXES)}=N, or several of them with commas between",
                try_="--parallel dp_shard=2,dp_replicate=2",
                where="--parallel",
            )
        sizes[name] = int(value)
    mesh = MeshSizes(**{"dp_shard": sizes.get("ep", 1)} | sizes)
    if mesh.world == 1:
        raise ConfigError(
            "Mesh of one process", got=text, need="at least two", try_="--parallel dp_shard=2", where="--parallel"
        )
    return mesh.fill(mesh.world)


def compare(loaded: Loaded, sizes: MeshSizes) -> list[Gap]:
    """Compare for parity: the differences between several ranks and one, the worst first.

    Args:
        loaded: the recipe; its model is made small.
        sizes: of the ranks' mesh.

    Raises:
        TilewrightError: the recipe cannot be trained; that of the side which failed first.
    """
    import numpy as np

    from tilewright.cli.commands.outputs.parity_model import with_small_model

    with tempfile.TemporaryDirectory() as folder:
        loaded = with_small_model(loaded, Path(folder) / "model", max(2, num_stages(loaded.recipe, sizes)))
        recipe = tiny(loaded.recipe, sizes)
        _check_mesh(recipe, sizes)
        say(f"{STEPS} steps on one process, then on {sizes.world}{_checked(recipe, sizes)}")
        once = recipe.train.activation_checkpoint == "none"  # in stages other rows pass before a layer runs again
        sides, held = [], {"choices": sizes.pp == 1 or once, "given": ""}
        for number, (mesh, environs) in enumerate(_sides(sizes)):
            out, path = Path(folder) / f"{number}.npz", Path(folder) / f"parity{number}.toml"
            of_side = changed(recipe, {f"parallel.{axis}": mesh[axis] for axis in ("pp", "tp", "ep")})
            write_run_toml(Loaded(of_side, dict.fromkeys(loaded.sources, "parity"), loaded.name, loaded.path), path)
            _run_side(environs, recipe=str(path), mesh=mesh, out=str(out), held=held)
            sides.append(dict(np.load(out, allow_pickle=False)))
            held["given"] = str(out)
    one, ranks = sides
    return gaps(one, ranks, limits_of(recipe, one, sizes.data))


def _checked(recipe: Recipe, sizes: MeshSizes) -> str:
    """Checked parts of a recipe in the parity check, beside its mesh."""
    documents = recipe.data.rows == "documents"
    stages = sizes.pp > 1
    found = {
        f"stages in the order of {recipe.parallel.schedule}": stages,
        "whole documents": documents,
        "placed by cost": documents and stages and recipe.parallel.balance == "on",
        "tied ends": stages and recipe.model.tie_embeddings,
    }
    return "".join(f", {text}" for text, there in found.items() if there)


def _check_mesh(recipe: Recipe, sizes: MeshSizes) -> None:
    """Raise ConfigError if the parity check cannot spread the experts, cut the matrices or send the tensors of this
    recipe."""
    there = changed(recipe, {f"parallel.{axis}": size for axis, size in asdict(sizes).items()})
    for found in (*expert_conflicts(there), *tensor_conflicts(there), *sync_conflicts(there)):
        try_ = f"--parallel dp_shard={sizes.dp_shard if sizes.dp_shard > 1 else sizes.world}"
        raise ConfigError(found.what, got=found.got, need=found.need, try_=try_, where="--parallel")


def _run_side(environs: Sequence[Mapping[str, str]], **arguments: Any) -> None:
    """Run a side of the parity check: its processes, to their end; where one fails, so do the others, the one that
    hangs by force.

    Raises:
        TilewrightError: that of the process which failed first.
    """
    children: list[Popen[str]] = []
    problems: list[BaseException] = []  # in the order in which they came

    def run(environ: Mapping[str, str]) -> None:
        try:
            call_module(__name__, say, environ, children.append, **arguments)
        except BaseException as error:
            problems.append(error)
            raise

    with ThreadPoolExecutor(len(environs)) as pool:
        calls = [pool.submit(run, environ) for environ in environs]
        _, running = wait(calls, return_when=FIRST_EXCEPTION)
        if running:
            wait(running, timeout=GRACE_S)
        if problems:
            for child in children:
                child.kill()
    if problems:
        raise next((error for error in problems if isinstance(error, TilewrightError)), problems[0])


def _sides(sizes: MeshSizes) -> list[tuple[dict[str, int], list[dict[str, str]]]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [(asdict(mesh), env.of_ranks(mesh.world, port)) for mesh in (MeshSizes(), sizes)]


def num_stages(recipe: Recipe, sizes: MeshSizes) -> int:
    """Count the pipeline stages of the parity check, each with a layer at least; 1 without a pipeline."""
    if sizes.pp == 1:
        return 1
    return Pipeline.of(recipe.parallel.model_copy(update={"pp": sizes.pp})).num_stages


def tiny(recipe: Recipe, sizes: MeshSizes) -> Recipe:
    """The tiny recipe of the parity check, with a small model, short rows and one row per micro-batch, two for each
    rank that reads rows of its own, and twice as many for each stage of a pipeline, which has a layer at least."""
    rows = 2 if recipe.data.format == "preferences" else 1
    settings: dict[str, Any] = {
        "run.device": "cpu" if recipe.run.device == "cpu" else "auto",
        "run.threads": 1,
        "data.seq_len": min(recipe.data.seq_len, 128),
        "train.steps": STEPS,
        "train.global_batch_size": 2 * sizes.data * rows * sizes.pp,
        "train.micro_batch_size": rows,
        "train.compile": "off",
        "parallel.split": (),
        "parallel.expert_order": (),
        "optim.warmup_steps": 0,
        "memory.plan": "",
        "memory.executor": "standard",
        "optim.clip": "two_pass",
        "plan.enforce": False,
        "plan.device_memory": 0,
        "parallel.timeout_minutes": min(recipe.parallel.timeout_minutes, PATIENCE_S / 60),
    }
    if recipe.parallel.expert_order:  # of more layers: other experts are copied, if any are
        settings["parallel.place_experts"] = "on"
    if not recipe.model.path:
        model, heads = recipe.model, 4
        experts = min(model.num_experts, max(8, sizes.ep))
        settings |= {
            "model.dim": 64,
            "model.num_layers": max(min(model.num_layers, 2), num_stages(recipe, sizes)),
            "model.layers": (),
            "model.num_heads": heads,
            "model.num_kv_heads": model.num_kv_heads and max(min(model.num_kv_heads, 2), min(sizes.tp, heads)),
            "model.head_dim": 16 if model.head_dim else 0,
            "model.ffn_dim": 128 if model.ffn_dim else 0,
            "model.expert_dim": 32 if model.expert_dim else 0,
            "model.num_experts": experts,
            "parallel.redundant_experts": min(recipe.parallel.redundant_experts, experts - experts // sizes.ep),
        }
    return changed(recipe, settings)


def gaps(one: Mapping[str, Any], ranks: Mapping[str, Any], limits: ParityLimits) -> list[Gap]:
    """List the differences of the parity check, the largest relative to its tolerance first. Gradients of experts are
    compared one by one and together.

    Args:
        one: tensors of one process, under `loss/...`, `gradient/...` and `weight/...`; `routing/...` is 0.
        ranks: those of the ranks; `routing/...` is the share of choices that are others than one process's.
        limits: of each kind.
    """
    found: list[Gap] = []
    stacks: dict[str, list[tuple[float, float]]] = {}
    for key in one.keys() | ranks.keys():
        kind, _, name = key.partition("/")
        limit = limits.of(kind, name)
        if limit is None:  # what one process has written down for the ranks
            continue
        difference, norm = _difference(one.get(key), ranks.get(key))
        found.append(Gap(kind, name, difference / (norm or 1.0), limit))
        if (stack := in_stacks(key)) != key and kind == "gradient":
            stacks.setdefault(stack, []).append((difference, norm))
    for key, parts in stacks.items():
        difference, norm = map(hypot, *parts)
        kind, _, name = key.partition("/")
        found.append(Gap(kind, name, difference / (norm or 1.0), limits.gradient))
    return sorted(found, key=lambda gap: (-gap.error / gap.tolerance, gap.kind, gap.name))


def _difference(one: Any, ranks: Any) -> tuple[float, float]:
    """The norm of a tensor's difference between ranks and one process (infinite if it is missing or not a number), and
    the norm of the tensor on one process."""
    import numpy as np

    if one is None or ranks is None or one.shape != ranks.shape:
        return float("inf"), 1.0
    difference = float(np.linalg.norm(ranks - one))
    return difference if difference == difference else float("inf"), float(np.linalg.norm(one))


# ---- in the processes ----


def routing_of(seen: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, Any]:
    """The share of expert choices that the ranks of the parity check would have made otherwise, by router.

    Args:
        seen: on each rank by router: choices that would have been others, and choices.

    Example:
        >>> routing_of([{"a": (1, 8)}, {"a": (2, 4)}])
        {'routing/a': array([0.25])}
    """
    import numpy as np

    found: dict[str, Any] = {}
    for name in {name for of_rank in seen for name in of_rank}:
        changed, made = (sum(of_rank[name][place] for of_rank in seen if name in of_rank) for place in (0, 1))
        found[f"routing/{name}"] = np.array([changed / made])
    return found


def train_side(recipe: str, mesh: dict[str, int], out: str, held: dict[str, Any]) -> int:
    """Train a side of the parity check: the steps as one rank; the first one writes the side's numbers.

    Args:
        recipe: path.
        mesh: ranks by axis.
        out: written, of the side.
        held: whether `choices` are those of one process too, and the file of its numbers: `given`, or "" on its side.
    """
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor

    from tilewright.cli.commands.outputs.parity_held import HeldChoices, hold_gradients
    from tilewright.parallel.agree import gather
    from tilewright.parallel.launch import launched
    from tilewright.training.assemble import build, set_up
    from tilewright.training.planning.rank_watch import watched

    loaded = load_recipe(recipe, environ={})
    timeout_s = 60 * loaded.recipe.parallel.timeout_minutes
    found: dict[str, Any] = {}
    device = loaded.recipe.run.device
    with (
        launched(MeshSizes(**mesh), device=device, timeout_s=timeout_s) as launch,
        watched(launch, Path(recipe).parent, answer_error) as world,
    ):
        parts = build(set_up(loaded, world=world), fresh=True)
        if world.heartbeat is not None:
            parts.memory_tracker.on_phase = world.heartbeat.phase
        named = list(parts.model.named_parameters())
        given = dict(np.load(held["given"], allow_pickle=False)) if held["given"] else None
        choices = HeldChoices(parts.model, given) if held["choices"] else None

        def keep(kind: str, tensor: torch.Tensor | None, name: str) -> None:
            if tensor is not None and f"{kind}/{name}" not in found:
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"{kind}/{name}"] = whole.detach().double().cpu().numpy()

        def before_update(*_: object) -> None:
            number = sum(key.startswith("loss/") for key in found)  # of the step
            suffix = f", step {number + 1}" if number else ""
            for name, param in named:
                keep("gradient", param.grad, f"{name}{suffix}")
            if given is not None:
                hold_gradients(named, given, suffix)

        hook = parts.optimizer.register_step_pre_hook(before_update)
        try:
            for step in range(STEPS):
                world.begin(f"step {step + 1}")
                if choices is not None:
                    choices.step = step
                parts.modes.enter(step)
                result = parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
                found[f"loss/step {step + 1}"] = np.array([result.loss])
            for name, param in named:
                keep("weight", param, name)
        finally:
            hook.remove()
            parts.close()
        # Ranks of a row hold other layers, those of `ep` other experts.
        elsewhere = world.data.rank and not world.sizes.ep > 1
        of_ranks = gather(world.waiting_group, {} if elsewhere else found)
        seen = gather(world.waiting_group, {} if choices is None else choices.shares())
        if world.is_first:
            numbers: dict[str, Any] = {key: value for of_rank in of_ranks for key, value in of_rank.items()}
            numbers.update(routing_of(seen) | ({} if choices is None else choices.seen))
            np.savez(out, **numbers)
    return world.rank


if __name__ == "__main__":
    answer(train_side)
