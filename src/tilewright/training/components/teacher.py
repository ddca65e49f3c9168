"""The teacher of `[distill]`: a frozen model that adds its last hidden values to each micro-batch.

They and the weight of its head are all that `models.distill.loss` needs: logits are made there by chunks. A checkpoint
holds the hash of the teacher's weights, so that a run is not continued with another teacher. Of several ranks each
holds the whole teacher, which has neither gradients nor states, and runs it on its own rows. Where the student is in
stages, so is the teacher: one range of its layers per rank of the row, the last one where the student's loss is. All
micro-batches of a step pass it before the student's first one, and the rank with the loss alone adds to them. With
`distill.cache` some of its tokens are kept instead (`teacher_rows`), and it runs on rows that were never seen alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.errors import CheckpointError, ConfigError, DataError
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer
from tilewright.data.common.tokenizer_folder import folder_tokenizer
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.protocols import Model
from tilewright.models.build import build_model, random_values, stored_values
from tilewright.models.distill import loss as distill
from tilewright.models.distill.hidden import VALUES, Target, captured, check_stream, pairs_of
from tilewright.models.teacher_folder import TeacherFolder, find_teacher, stream_of, stream_width
from tilewright.ops.linear import machines_linear
from tilewright.parallel.agree import any_of, gather, sum_over
from tilewright.parallel.fill_shards import fill_from_meta
from tilewright.parallel.parallelize import in_stages
from tilewright.parallel.pipeline.microbatch_plan import StepPlan
from tilewright.parallel.pipeline.stage_base import Staged, unwatched
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import World
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy, in_fp32
from tilewright.training.checkpoint.checkpoint_state import load_newest
from tilewright.training.components.model import build_adapted
from tilewright.training.components.teacher_rows import TeacherRows
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook

_CHOOSING_BYTES = 32
"""Of each logit while tokens are chosen: four arrays in FP64."""


class Teacher(StepHook):
    """A frozen model with the student's tokenizer.

    Args:
        open_model: gives the model, on the device, converted to what it computes in.
        section: how it teaches, and its name for errors.
        device: where it is.
        open_rows: of the weights' hash the rows that are kept on disk; None: none are. Where some are there, the model
            is opened again with the first row that is not.
        world: of the run.
    """

    name, repeatable = "teacher", True

    def __init__(
        self,
        open_model: Callable[[], Model],
        section: DistillSection,
        device: torch.device,
        open_rows: Callable[[str], TeacherRows] | None = None,
        world: World = World.alone(),  # noqa: B008 (frozen)
    ) -> None:
        self._world, self._row = world, world.row.handle
        self.device, self._path, self._open = device, section.teacher, open_model
        self._how = distill.how(section.temperature, section.weight, section.divergence)
        self._temperature, self._pairs = section.temperature, pairs_of(section)
        model = self._opened()
        self._digest = weights_hash(model, self._row)
        self._in_stages = isinstance(model, Staged)
        self._teaches = not isinstance(model, Staged) or model.has_last
        rows = None if open_rows is None else open_rows(self._digest)  # on all ranks of a row: one may not raise alone
        self.rows = rows if self._teaches else None
        self._keeps = rows is not None
        self._model: Model | None = None if any_of(self._row, bool(rows), device) else model
        self._found, self._computed = 0, 0
        self._tell_pass: Callable[[str], AbstractContextManager[None]] | None = None
        """Told of each pass of a stage, open while it runs."""

    @property
    def model(self) -> Model:
        """The teacher's model, frozen."""
        if self._model is None:
            self._model = self._opened()
        return self._model

    def _opened(self) -> Model:
        return self._open().eval().requires_grad_(False)  # type: ignore[attr-defined]

    def before_step(self, step: Step) -> Step:
        """The step on the micro-batches with what the teacher adds to them.

        Raises:
            ConfigError: ranks in a row do not read the same; nothing was sent.
        """
        self._world.at("teacher")
        if self._row is not None:
            StepPlan.of(step.microbatches).check(self._world)
        with self._told_of_passes():
            taught = replace(step, microbatches=self.taught(step.microbatches))
        if self.rows is not None:
            self.rows.has_read(step.number)
        return taught

    @contextmanager
    def _told_of_passes(self) -> Iterator[None]:
        """Inside, a rank with some of the teacher's layers notes which pass it is in, and waits between two of them."""
        heartbeat = self._world.heartbeat
        if not self._in_stages or heartbeat is None:
            yield
            return
        try:
            with heartbeat.passing() as self._tell_pass:
                yield
        finally:
            self._tell_pass = None

    @torch.no_grad()
    def taught(self, microbatches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The micro-batches with what the teacher adds to them, on ranks that have the student's loss."""
        if self._keeps:
            return [{**batch, **self._kept(number, batch)} for number, batch in enumerate(microbatches)]
        found = []
        with evaluation(self.model):  # type: ignore[arg-type]
            head = _head(self.model) if self._teaches else None  # once: a head that is rounded to integers is a copy
            for number, batch in enumerate(microbatches):
                with captured(self._inside()) as inside:
                    hidden = self._hidden(number, batch)
                extra = {} if head is None or hidden is None else {distill.HIDDEN: hidden, distill.HEAD: head}
                if self._pairs:
                    extra[VALUES] = self._values(inside, batch["labels"])
                found.append({**batch, **(extra and extra | {distill.HOW: self._how})})
        return found

    def _inside(self) -> dict[tuple[Target, int], torch.nn.Module]:
        """The teacher's modules whose values the student learns, by their pairs' target and layer."""
        model, layers = self.model, self.model.layers if self._pairs else ()
        found = {}
        for pair in self._pairs:
            layer = layers[pair.theirs]
            module = layer if pair.target == "hidden" else model.attention_of(layer)
            assert module is not None, "refused when the student was built"
            found[pair.target, pair.theirs] = module
        return found

    def _values(self, inside: Mapping[tuple[Target, int], Tensor], labels_BS: Tensor) -> Tensor:
        """Values [B, S, M, E] that the teacher's layers gave, in the order of the pairs."""
        width = stream_width(self.model)
        for pair in self._pairs:
            whose = f"layer {pair.theirs} of the teacher"
            check_stream(inside.get((pair.target, pair.theirs)), labels_BS, width, pair.target, whose)
        return torch.stack([inside[pair.target, pair.theirs] for pair in self._pairs], dim=2)

    def _hidden(self, number: int, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Input of the teacher's head for a micro-batch; None on ranks without it."""
        model, there, tell = self.model, self._there(batch), self._tell_pass
        if not isinstance(model, Staged):
            return model.hidden(there)

        def watch(stage: int) -> AbstractContextManager[None]:
            name = f"teacher's forward of micro-batch {number + 1}, stage {stage + 1}"
            return unwatched(stage) if tell is None else tell(name)

        return model.last_hidden(there, watch)

    def _there(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _kept(self, number: int, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The teacher's tokens of a micro-batch, from the disk; those of rows that are not there are made, and kept.
        What is used is what is kept, bit for bit, so that a row teaches the same each time."""
        count, rows = len(batch["input_ids"]), self.rows
        found: list[Any] = [None] * count if rows is None else rows.find(batch)
        missing = self._missing(found)
        self._found, self._computed = self._found + count - len(missing), self._computed + len(missing)
        if missing:
            part = {name: tensor[missing] for name, tensor in batch.items() if len(tensor) == count}
            with evaluation(self.model):  # type: ignore[arg-type]
                hidden_BSE = self._hidden(number, part)
                if rows is not None and hidden_BSE is not None:
                    rows.add(part, *self._chosen(hidden_BSE, rows, part))
            for row, one in zip(missing, () if rows is None else rows.find(part), strict=rows is not None):
                found[row] = one
        if rows is None:
            return {}
        tokens, logs = (torch.stack(parts) for parts in zip(*_all(found), strict=True))
        return {distill.TOKENS: tokens, distill.LOGS: logs, distill.HOW: self._how}

    def _missing(self, found: Sequence[tuple[Tensor, Tensor] | None]) -> list[int]:
        """Rows of which the disk has nothing of the teacher's, on all ranks of a row as the one that reads it says."""
        missing = torch.tensor([float(self._teaches and one is None) for one in found], device=self.device)
        sum_over(self._row, [missing])
        return missing.nonzero().flatten().tolist()

    def _chosen(self, hidden_BSE: Tensor, rows: TeacherRows, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, K] that are chosen of the teacher's, and their logarithms [B, S, G], on the host."""
        head_VE, shape = _head(self.model), hidden_BSE.shape[:2]
        numbers_N = rows.numbers(batch).to(hidden_BSE.device).flatten()
        chunk = max(1, self.model.kernels.loss_chunk_bytes // (_CHOOSING_BYTES * len(head_VE)))
        parts = []
        for hidden_CE, numbers_C in zip(hidden_BSE.flatten(0, 1).split(chunk), numbers_N.split(chunk), strict=True):
            log_CV = (machines_linear(hidden_CE, head_VE).float() / self._temperature).log_softmax(-1)
            parts.append(rows.keeping.choose(log_CV, rows.top_k, numbers_C))
        tokens, logs = (torch.cat(each).cpu().unflatten(0, shape) for each in zip(*parts, strict=True))
        return tokens, logs

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, Any]:
        """Rows of the teacher that were read and made since the last line, and records that were damaged, of the first
        process."""
        if not self._keeps:
            return {}
        told = {"read": self._found, "made": self._computed, "damaged": 0 if self.rows is None else self.rows.damaged}
        self._found = self._computed = 0
        if self.rows is not None:
            self.rows.damaged = 0
        return {"teacher_rows": told}

    def state_dict(self) -> dict[str, Any]:
        """The teacher's state for a checkpoint."""
        return {"weights": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the run continues with the teacher that it had.

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


def open_teacher(
    recipe: Recipe,
    prepared: Any,
    student: Any,
    policy: Policy,
    world: World = World.alone(),  # noqa: B008 (frozen)
) -> Teacher | None:
    """The teacher of a run; None where there is none.

    Args:
        recipe: reads `[distill]`, and of `[data]` and `[train]` how many rows may be kept.
        prepared: data of the run, with the student's tokenizer.
        student: a causal language model; its kernels serve the teacher too.
        policy: of the student; the teacher computes in the same format, 8 bits and rules apart.
        world: of the run. Of a row of ranks each has some of the teacher's layers.

    Raises:
        ConfigError: no such run or folder, another tokenizer, a cache of something else, or a teacher that cannot be
            cut into stages where the student is.
        CheckpointError: weights that cannot be read.
        FitError: no room on the disk for a cache.
        DataError: a cache that cannot be read or written.
    """
    section, tokenizer = recipe.distill, getattr(prepared, "tokenizer", None)
    if not section.teacher or tokenizer is None:
        return None
    found, kernels, device = find_teacher(section.teacher), student.kernels, torch.device(policy.device_type)
    mode = "bf16_mixed" if policy.matmul == "bf16" else "fp32"
    words = student.words if isinstance(student, Staged) else find_heads(student)[-1].out_features
    vacant = world.row.size > 1 and not found.lora.rank  # adapters are merged into values
    at, own = torch.device("meta") if vacant else device, _tokenizer_of(found)

    def open_model() -> Model:
        rules = in_fp32(Policy.from_section(found.run.precision, device.type)).rules if found.run else ()
        if found.run is not None:
            plain = found.run.model_copy(update={"model": found.model.model_copy(update={"weights": "random"})})
            model = build_adapted(plain, own.vocab_size, kernels, at)
            if not vacant:
                load_newest(found.path, model)
        else:
            model = build_model(found.model, own.vocab_size, kernels, at)
        _check_vocabulary(section.teacher, own, tokenizer, _head(model).shape[0], words)
        convert(model, Policy(mode, rules, device_type=device.type), kernels=kernels)
        return _staged(model, found, student, world, device) if isinstance(student, Staged) else model

    def open_rows(weights: str) -> TeacherRows:
        top_k = min(section.cache_top_k, words - 1)  # of so few tokens all are known
        made_of = {
            "format": 2, "teacher": weights, "data": prepared.fingerprint, "top_k": top_k, "vocab_size": words,
            "temperature": section.temperature, "computed_in": mode,
        }  # fmt: skip
        rows = TeacherRows(
            Path(section.cache).expanduser(), made_of, top_k=top_k, vocab_size=words,
            divergence=section.divergence, stream=stream_of(recipe), steps=recipe.train.steps,
        )  # fmt: skip
        steps = recipe.train.steps * recipe.train.global_batch_size
        rows.check_room(min(steps, sum(prepared.num_rows.values())), recipe.data.seq_len)
        return rows

    return Teacher(open_model, section, device, open_rows if section.cache else None, world)


def _tokenizer_of(found: TeacherFolder) -> Tokenizer:
    return load_tokenizer(found.path / "tokenizer.json" if found.run else folder_tokenizer(str(found.path)))


def _staged(model: Model, found: TeacherFolder, student: Staged, world: World, device: torch.device) -> Model:
    """The teacher in stages, this rank's layers: as many on each rank, in such an order that the last one is where the
    student's is. One on the meta device reads the values of these alone."""
    last = student.pipeline.rank_of(student.pipeline.num_stages - 1)
    pipeline = Pipeline(student.pipeline.pp, reverse=last != student.pipeline.pp - 1)
    if not next(model.parameters()).is_meta:
        whole: Any = in_stages(model, pipeline, world.row, device, None)
        return whole
    values = random_values(model, 0) if found.run is not None else stored_values(model, found.path)
    part: Any = in_stages(model, pipeline, world.row, device, values)
    fill_from_meta(part, values, device, fresh=found.run is None)
    if found.run is not None:
        load_newest(found.path, part, whole=False)
    return part


def weights_hash(model: Model, row: dist.ProcessGroup | None = None) -> str:
    """Hash a teacher's weights: all parameters and buffers that have dimensions; of all ranks in a row together."""
    own = {
        name: xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        for name, tensor in model.state_dict().items()  # type: ignore[attr-defined]
        if tensor.ndim
    }
    whole = {name: digest for of_rank in gather(row, own) for name, digest in of_rank.items()}
    return xxhash.xxh3_64_hexdigest(repr(sorted(whole.items())).encode())


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


def _all(found: Sequence[tuple[Tensor, Tensor] | None]) -> list[tuple[Tensor, Tensor]]:
    """The teacher's tokens of all rows that were just written."""
    if any(one is None for one in found):
        raise DataError(
            "Teacher's tokens were not read back as they were written",
            got="another hash of a record",
            need="a disk that keeps what is written",
            try_="distill.cache on another disk",
            where="distill.cache",
        )
    return [one for one in found if one is not None]


def _head(model: Model) -> Tensor:
    """The weight of the teacher's head as it multiplies."""
    operands = getattr(model.head, "operands", None)
    return model.head.weight if operands is None else operands(model.head.weight[:0])[1].detach()
