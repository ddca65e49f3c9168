"""Log-probabilities of preferences' answers by the model that training begins with: computed once, kept on disk by row.

The entry's name has the data's fingerprint and that of the starting weights in it: files of the folder, or shape and
seed; and the precision, so that at the first step the model equals its reference.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import platformdirs
import torch
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import FitError
from tilewright.core.log import say
from tilewright.core.units import format_seconds
from tilewright.data.common.cache_entries import cached, damage
from tilewright.data.common.progress import timed
from tilewright.data.dataset.prepared_chat import PreparedChat
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import Model
from tilewright.models.folder.find_model import local_folder
from tilewright.parallel.launch import in_turn, on_any
from tilewright.parallel.world import World

FILE = "logps.npy"


def attach_reference(
    recipe: Recipe,
    prepared: object,
    device: torch.device,
    starting: Callable[[], AbstractContextManager[Model]],
    world: World = World.alone(),  # noqa: B008 (frozen)
) -> None:
    """Attach log-probabilities of the reference model to preferences; other data needs none.

    Args:
        recipe: of the run.
        prepared: data of any kind.
        device: where the model is.
        starting: gives the model with the weights that training begins with; not called where its log probabilities
            are on disk.
        world: of several ranks one computes and the others read what it wrote; those that hold parts of the model
            compute together where a machine, whose disk may be its own, lacks them.

    Raises:
        FitError: the plan chose an executor that does not compute pairs.
        DataError: the cache folder cannot be written.
    """
    if not isinstance(prepared, PreparedChat) or not prepared.pairs:
        return
    if not recipe.memory.can.whole_model:
        raise FitError(
            "Preferences do not fit into memory",
            got=f"a plan with the {recipe.memory.executor} executor",
            need="the standard executor: both answers of a pair are computed before their loss",
            try_="lora.rank = 16, train.micro_batch_size = 2, or a smaller data.seq_len",
        )
    root = Path(recipe.data.cache_dir or platformdirs.user_cache_dir("tilewright")).expanduser()
    entries, key = root / "data", f"reference-{prepared.fingerprint[:16]}-{weights_digest(recipe)}"
    computed: list[np.ndarray] = []

    def compute() -> None:
        with starting() as model:
            seconds = timed("reference", _compute, computed, prepared, device, model)
        say(f"reference log probabilities of {prepared.num_pairs:,} pairs in {format_seconds(sum(seconds.values()))}")

    def build(folder: Path) -> None:
        if not computed:
            compute()
        np.save(folder / FILE, computed[0])

    if world.model.size > 1 and on_any(world, lambda: damage(entries / key) is not None):
        compute()
    # Log probabilities of the chosen and the rejected answer of each pair, FP32 [pairs, 2], training pairs first.
    logps = np.load(in_turn(world, lambda: cached(entries, key, build)) / FILE, allow_pickle=False)
    prepared.set_reference(logps, recipe.train.dpo_beta)


def weights_digest(recipe: Recipe) -> str:
    """Hash of all that the reference model's log-probabilities depend on."""
    digest = xxhash.xxh3_64(recipe.model.model_dump_json(exclude={"path"}).encode())
    digest.update(recipe.precision.model_dump_json().encode())
    digest.update(f"{recipe.lora.rank > 0} {recipe.lora.base} {recipe.lora.targets}".encode())
    if recipe.model.weights == "random":
        digest.update(str(recipe.run.seed).encode())
    if recipe.model.path:
        folder = Path(local_folder(recipe.model.path)).expanduser()
        for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
            digest.update(f"{file.name} {hash_file(file)}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def _compute(
    computed: list[np.ndarray], prepared: PreparedChat, device: torch.device, model: Model, *, progress
) -> None:
    progress.phase("log probabilities of the starting model", prepared.num_pairs)
    found = []
    with evaluation(model):
        for batch in prepared.all_pairs():
            for answer in range(2):
                row = {name: values[:, answer].to(device) for name, values in batch.items() if values.dim() == 3}
                found.append(-float(model.loss(row).loss_sum))
            progress.advance(1)
    computed.append(np.array(found, np.float32).reshape(-1, 2))
