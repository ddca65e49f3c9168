"""A stream in plain loops, accelerate and the Trainer: the order of its samples, and a position that continues."""

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.draws import examples
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.data.batches.stream import Stream
from tilewright.integrations.stream import StreamLoader, StreamRows, language_model_row
from tilewright.integrations.transformers_stream import StreamCallback

VOCAB, LENGTH, STEP = 96, 12, 8


class Rows:
    """Rows of two documents, a function of their domain and number."""

    fingerprint = "r0"

    def __init__(self):
        self.num_rows = {"x": 300, "y": 500}

    def train_arrays(self, picks, seed):
        number = (1000 * picks.domain + picks.row)[:, None]
        at = np.arange(LENGTH)[None]
        return {
            "input_ids": (7 * number + 13 * at) % VOCAB,
            "labels": (7 * number + 13 * at + 13) % VOCAB,
            "positions": np.broadcast_to(at % (LENGTH // 2), (len(number), LENGTH)).copy(),
            "segments": np.broadcast_to((at >= LENGTH // 2).astype(np.int32), (len(number), LENGTH)).copy(),
        }

    def blank_row(self):
        zeros = np.zeros((1, LENGTH), np.int64)
        return {"input_ids": zeros, "labels": zeros - 100, "positions": zeros, "segments": zeros.astype(np.int32) - 1}

    def describe_row(self, domain, row):
        return []


def stream(micro=3, rank=0, world=1, prefetch=0, batch_size=STEP):
    return Stream(
        Rows(), seed=4, batch_size=batch_size, micro_batch_size=micro, rank=rank, world=world, prefetch=prefetch
    )


class Answers(Rows):
    """Rows that learn some of their tokens, one to all of them, and each third row none."""

    def train_arrays(self, picks, seed):
        arrays = super().train_arrays(picks, seed)
        number = (1000 * picks.domain + picks.row)[:, None]
        learned = np.where(number % 3 == 0, 0, 1 + number % LENGTH)
        return arrays | {"labels": np.where(np.arange(LENGTH)[None] < learned, arrays["labels"], -100)}


def ids(batches):
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def plain(steps, moves=()):
    """Rows of the first steps, by a stream alone; moves as {step: weights}."""
    one, found = stream(), []
    for step in range(steps):
        if step in dict(moves):
            one.move(dict(moves)[step], "test")
        found += ids(one.next_step())
    return found


MOVES = {30: {"x": 9.0, "y": 1.0}, 50: {"x": 1.0, "y": 4.0}}


@examples(12)
@given(stops=st.lists(st.integers(1, 60), min_size=1, max_size=4), micro=st.integers(1, 5), prefetch=st.integers(0, 2))
def test_micro_batches_continue_from_any_of_them(stops, micro, prefetch):
    """Stops inside of steps too, after which another process loads the state as JSON; moves are at ends of steps."""
    state, found, steps = None, [], 0
    for stop in [*stops, 10**9]:
        loader = StreamLoader(stream(micro, prefetch=prefetch))
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for number, batch in enumerate(loader, 1):
            found += ids([batch])
            steps += loader.step_ends
            if loader.step_ends and steps in MOVES:
                loader.move(MOVES[steps], "test")
            if number == stop or steps == 70:
                break
        state = json.dumps(loader.state_dict())
        loader.steps.stream.close()
        if steps == 70:
            break
    assert found == plain(70, MOVES.items())


def test_ranks_have_the_samples_of_one_process():
    loaders = [iter(StreamLoader(stream(micro=4, rank=rank, world=2))) for rank in range(2)]
    parts = [ids([next(loader) for _ in range(20)]) for loader in loaders]
    assert [row for pair in zip(*parts, strict=True) for row in pair] == plain(20)


@examples(25)
@given(ahead=st.integers(0, 5), at=st.integers(0, 40), move=st.integers(0, 40))
def test_a_state_before_a_step_that_was_read_ahead_has_the_moves_since(ahead, at, move):
    """What was handed out before a move came of the old weights, and comes again the same."""
    rows = StreamRows(stream())
    loader = iter(DataLoader(rows, batch_size=STEP))
    taken = [ids([next(loader)]) for _ in range(at)]
    for _ in range(ahead):
        taken.append(ids([next(loader)]))
    rows.move({"x": 1.0, "y": 30.0}, "test")
    state = json.loads(json.dumps(rows.steps.state_before(at)))
    taken += [ids([next(loader)]) for _ in range(60)]
    other = stream()
    other.load_state_dict(state)
    assert [ids(other.next_step()) for _ in range(ahead + 60)] == taken[at:]


@examples(12)
@given(micro=st.integers(1, STEP), skip=st.integers(0, 20), world=st.integers(1, 2))
def test_accumulated_gradients_are_those_of_the_whole_step(micro, skip, world):
    """Of micro-batches with unequal numbers of targets, none included, on each rank. After a stop inside of a step,
    too."""
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **shape)).double().eval()  # FP64 throughout

    def gradients(loss):
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])

    for rank in range(world):

        def made(micro, rank=rank):
            return Stream(Answers(), seed=4, batch_size=STEP, micro_batch_size=micro, rank=rank, world=world)

        loader = StreamLoader(made(micro))
        for _ in zip(range(skip), loader, strict=False):
            pass
        state, whole, steps = loader.state_dict(), made(STEP), loader.steps.stream.state_dict()["step"]
        loader = StreamLoader(made(micro))
        loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            (rows,) = whole.next_step()
        if state["given"] == 0:
            (rows,) = whole.next_step()
        found, given = torch.zeros(()), state["given"] * micro
        for batch in loader:
            row = language_model_row(*(batch[name] for name in ("input_ids", "positions", "labels")))
            found = found + gradients(model(**row, num_items_in_batch=loader.step_targets, use_cache=False).loss)
            if loader.step_ends:
                break
        logits = model(input_ids=rows["input_ids"], position_ids=rows["positions"], use_cache=False).logits
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows["labels"], reduction="none")
        expected = gradients(each[given:].sum() / rows["labels"].ne(-100).sum())
        bound = torch.finfo(torch.float32).eps * LENGTH * expected.abs().max()  # transformers takes the loss in FP32
        torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


# ---- accelerate ----


def test_accelerate_saves_the_position_with_the_rest(tmp_path):
    def begun():
        accelerator = Accelerator(cpu=True)
        loader = StreamLoader(stream(rank=accelerator.process_index, world=accelerator.num_processes))
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = begun()
    batches = iter(loader)
    first = ids([next(batches) for _ in range(7)])
    accelerator.save_state(str(tmp_path))
    rest = ids([next(batches) for _ in range(30)])
    accelerator, loader = begun()
    accelerator.load_state(str(tmp_path))
    batches = iter(loader)
    assert ids([next(batches) for _ in range(30)]) == rest
    assert (first + rest)[: 12 * STEP] == plain(12)


# ---- the Trainer ----


class Watch(TrainerCallback):
    """Moves weights after some steps, and ends training after one."""

    def __init__(self, rows, moves=(), end=None):
        self.rows, self.moves, self.end = rows, dict(moves), end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.moves:
            self.rows.move(self.moves[state.global_step], "test")
        if state.global_step == self.end:
            control.should_training_stop = True


def trainer(folder, accumulate=1, moves=(), end=None, callback=True, batch_size=STEP, **changes):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape))
    rows = StreamRows(stream(batch_size=batch_size))
    defaults = {
        "output_dir": str(folder), "max_steps": 60, "per_device_train_batch_size": STEP // accumulate,
        "gradient_accumulation_steps": accumulate, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 20, "logging_strategy": "no",
        "remove_unused_columns": False, "ignore_data_skip": True, "restore_callback_states_from_checkpoint": True,
    }  # fmt: skip
    callbacks = [Watch(rows, moves, end), *([StreamCallback()] if callback else [])]
    seen = []
    model.register_forward_pre_hook(lambda _, __, given: seen.extend(given["input_ids"].tolist()), with_kwargs=True)
    made = Trainer(model, TrainingArguments(**(defaults | changes)), train_dataset=rows, callbacks=callbacks)
    return made, seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_that_was_stopped_continues_with_the_same_rows_and_weights(accumulate, tmp_path):
    moves = {30: {"x": 9.0, "y": 1.0}}
    whole, seen = trainer(tmp_path / "whole", accumulate, moves)
    whole.train()
    assert seen == plain(60, moves.items())
    stopped, before = trainer(tmp_path / "parts", accumulate, moves, end=47)
    stopped.train()
    resumed, after = trainer(tmp_path / "parts", accumulate)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-40"))
    assert before == seen[: 47 * STEP]
    assert after == seen[40 * STEP :]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_losses_are_those_of_a_plain_loop_over_the_stream(tmp_path):
    """Targets that the stream names, of documents that do not see each other."""
    made, _ = trainer(tmp_path, max_steps=4, logging_strategy="steps", logging_steps=1, max_grad_norm=0.0)
    model = LlamaForCausalLM(made.model.config)
    model.load_state_dict(made.model.state_dict())
    made.train()
    optimizer, losses, one = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), [], stream(micro=STEP)
    for _ in range(4):
        (batch,) = one.next_step()
        halves = [slice(0, LENGTH // 2), slice(LENGTH // 2, LENGTH)]
        logits = torch.cat([model(batch["input_ids"][:, part], use_cache=False).logits for part in halves], 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    told = [row["loss"] for row in made.state.log_history if "loss" in row]
    assert told == pytest.approx(losses, abs=2e-4)  # the Trainer rounds to four places


BAD = {
    "columns are removed": ({"remove_unused_columns": True}, "remove_unused_columns=False"),
    "steps of another size": ({"batch_size": 5}, "differ in size"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_trainer_whose_settings_do_not_fit_is_an_error(name, tmp_path):
    changes, words = BAD[name]
    made, _ = trainer(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        made.train()


def test_a_resume_that_would_lose_the_position_is_an_error(tmp_path):
    made, _ = trainer(tmp_path, max_steps=2, save_steps=2)
    made.train()
    for changes in ({"ignore_data_skip": False}, {"restore_callback_states_from_checkpoint": False}):
        made, _ = trainer(tmp_path, max_steps=4, **changes)
        with pytest.raises(ConfigError, match=next(iter(changes))):
            made.train(resume_from_checkpoint=True)
    made, _ = trainer(tmp_path / "without", max_steps=2, save_steps=2, callback=False)
    made.train()
    made, _ = trainer(tmp_path / "without", max_steps=4)
    with pytest.raises(CheckpointError, match="no position of the stream"):
        made.train(resume_from_checkpoint=True)


def test_worker_processes_and_other_datasets_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torch.utils.data._utils.worker._worker_info", object())  # as inside of a DataLoader's worker
        with pytest.raises(ConfigError, match="process that trains"):
            next(iter(StreamRows(stream())))
    made, _ = trainer(tmp_path)
    made.train_dataset = [language_model_row(*torch.zeros(3, LENGTH, dtype=torch.long))] * 8
    with pytest.raises(ConfigError, match="needs rows of a stream"):
        made.train()
