"""The teacher of `[distill]`: a frozen model that adds its last hidden values to each micro-batch.

They and the weight of its head are all that `models.distill.loss` needs: logits are made there by chunks. A checkpoint
holds the hash of the teacher's weights, so that a run is not continued with another teacher. Of several ranks each
holds the whole teacher, which has neither gradients nor states, and runs it on its own rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tilewright.core.config.recipe import DistillSection, Recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer
from tilewright.data.common.tokenizer_folder import folder_tokenizer
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.protocols import Model
from tilewright.models.build import build_model
from tilewright.models.distill import loss as distill
from tilewright.models.teacher import find_teacher
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy, in_fp32
from tilewright.training.checkpoint.state import load_newest
from tilewright.training.components.model import build_adapted
from tilewright.training.hooks.base import Step, StepHook


class Teacher(StepHook):
    """A frozen model with the student's tokenizer.

    Args:
        model: on the device, converted to what it computes in.
        section: how it teaches, and its name for errors.
        device: where it is.
    """

    name, repeatable = "teacher", True

    def __init__(self, model: Model, section: DistillSection, device: torch.device) -> None:
        self.model, self._path = model.eval().requires_grad_(False), section.teacher  # type: ignore[attr-defined]
        self.device = device
        self._how = distill.how(section.temperature, section.weight, section.divergence)
        digest = xxhash.xxh3_64()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy() if tensor.ndim else b"")
        self._digest = digest.hexdigest()

    def before_step(self, step: Step) -> Step:
        """The step on the micro-batches with what the teacher makes of them."""
        return replace(step, microbatches=self.taught(step.microbatches))

    @torch.no_grad()
    def taught(self, microbatches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The micro-batches with what the teacher makes of them."""
        found = []
        with evaluation(self.model):  # type: ignore[arg-type]
            head = _head(self.model)  # once: a head that is rounded to integers is a copy
            for batch in microbatches:
                there = {name: tensor.to(self.device) for name, tensor in batch.items()}
                extra = {
                    distill.HIDDEN: self.model.hidden(there),
                    distill.HEAD: head,
                    distill.HOW: self._how,
                }
                found.append({**batch, **extra})
        return found

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"weights": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the run goes on with the teacher that it had.

        Raises:
            CheckpointError: its weights are others now.
        """
        if state["weights"] != self._digest:
            raise CheckpointError(
                "Teacher has other weights than when the run was stopped",
                got=f"{self._path} with weights {self._digest}",
                need=f"weights {state['weights']}",
                try_="a copy of the teacher that nothing trains further, or a new run.name",
                where="distill.teacher",
            )


def open_teacher(section: DistillSection, tokenizer: Tokenizer | None, student: Any, policy: Policy) -> Teacher | None:
    """The teacher of a run; None where there is none.

    Args:
        section: names it.
        tokenizer: of the student's data.
        student: a causal language model; its kernels serve the teacher too.
        policy: of the student; the teacher computes in the same format, 8 bits and rules apart.

    Raises:
        ConfigError: no such run or folder, or another tokenizer.
        CheckpointError: weights that cannot be read.
    """
    if not section.teacher or tokenizer is None:
        return None
    found, kernels, device = find_teacher(section.teacher), student.kernels, torch.device(policy.device_type)
    if found.run is not None:
        model, own, rules = _of_run(found.path, found.run, kernels, device)
    else:
        own, rules = load_tokenizer(folder_tokenizer(str(found.path))), ()
        model = build_model(found.model, own.vocab_size, kernels, device)
    _check_vocabulary(section.teacher, own, tokenizer, _head(model).shape[0], find_heads(student)[-1].out_features)
    mode = "bf16_mixed" if policy.matmul == "bf16" else "fp32"
    convert(model, Policy(mode, rules, device_type=device.type), kernels=kernels)
    return Teacher(model, section, device)


def _of_run(run: Path, recipe: Recipe, kernels: Kernels, device: torch.device):
    own = load_tokenizer(run / "tokenizer.json")
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": "random"})})
    model = build_adapted(plain, own.vocab_size, kernels, device)
    load_newest(run, model)
    return model, own, in_fp32(Policy.from_section(recipe.precision, device.type)).rules


def _check_vocabulary(name: str, own: Tokenizer, tokenizer: Tokenizer, rows: int, vocab_size: int) -> None:
    differ = own.backend.get_vocab() != tokenizer.backend.get_vocab()
    if differ or rows != vocab_size:
        raise ConfigError(
            "Teacher has another vocabulary",
            got=f"{name}: {own.vocab_size} tokens, a head of {rows} rows" + (", other tokens" if differ else ""),
            need=f"the tokens of this run's data, and a head of {vocab_size} rows: distributions are compared by token",
            try_=f"data.tokenizer = the tokenizer.json of {name}",
            where="distill.teacher",
        )


def _head(model: Model) -> Tensor:
    """The head's weight as it multiplies."""
    operands = getattr(model.head, "operands", None)
    return model.head.weight if operands is None else operands(model.head.weight[:0])[1].detach()
