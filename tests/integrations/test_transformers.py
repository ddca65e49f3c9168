"""Converted models inside the Hugging Face Trainer: losses of a plain loop, schedule, FP32 evaluation, loss scaling."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tilewright
from tilewright.core.errors import ConfigError
from tilewright.integrations.transformers import attach
from tilewright.integrations.transformers_control import ControllerCallback
from tilewright.precision.controller.controller_log import read_history
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy, Rule

STEPS, ROWS = 4, 2
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 80}
FP16 = Policy("hybrid", (Rule(op="linear", compute="fp16"),))


class Rows(Dataset):
    """Random token rows, the same every time."""

    def __len__(self):
        return STEPS * ROWS

    def __getitem__(self, index):
        ids = torch.randint(0, 80, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Masked(Rows):
    """The same rows, of which few tokens are learned, in each row another number."""

    def __getitem__(self, index):
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": torch.where(torch.arange(12) <= index % 3, ids, -100)}


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))

    @property
    def losses(self):
        return [row["loss"] for row in self.rows if "loss" in row]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2))


def bert():
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config)


def trainer_of(model, folder, **settings) -> tuple[Trainer, Losses]:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
    }
    keys = {key: settings.pop(key) for key in ("optimizer_cls_and_kwargs", "eval_dataset") if key in settings}
    losses = Losses()
    trainer = Trainer(
        model, TrainingArguments(**(defaults | settings)), train_dataset=Rows(), callbacks=[losses], **keys
    )
    return trainer, losses


def plain_losses(model, trainer) -> list[float]:
    """The same steps in a plain loop, over the batches that the Trainer draws."""
    torch.manual_seed(trainer.args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    model.train()
    for batch in trainer.get_train_dataloader():
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("policy", ["bf16_mixed", "hybrid", FP16], ids=["bf16_mixed", "hybrid", "fp16"])
def test_trainer_equals_a_plain_loop(make, policy, tmp_path):
    trainer, log = trainer_of(make(), tmp_path)
    report = attach(trainer, policy)
    trainer.train()
    assert "linear" in {row.op for row in report.changed}

    plain = tilewright.convert(make(), policy)
    want = plain_losses(plain, trainer_of(plain, tmp_path)[0])
    assert log.losses == pytest.approx(want, rel=3e-3)  # the bound of BF16: 2^-8 relative a matmul
    fp32 = plain_losses(make(), trainer_of(make(), tmp_path)[0])
    assert log.losses == pytest.approx(fp32, rel=1e-2)


def test_fp16_scaling_is_in_the_logs_and_skips_overflows(tmp_path):
    model = llama()
    trainer, _ = trainer_of(model, tmp_path)
    scaler = DynamicScaler(2.0**40, max=2.0**40, backoff=2.0**-10)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    skipped = []

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            same = all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
            skipped.append(same)

    trainer.add_callback(Watch())
    attach(trainer, FP16, scaler=scaler)
    trainer.train()
    assert skipped[0]  # 2^40 overflows FP16
    assert not skipped[-1]
    assert scaler.skipped == sum(skipped)
    assert trainer.state.log_history[0]["loss_scale"] == 2.0**30
    assert trainer.state.log_history[0]["skipped_steps"] == 1


def test_fp16_brings_its_own_scaler_from_the_parameter_count(tmp_path):
    trainer, _ = trainer_of(llama(), tmp_path)
    assert attach(trainer, FP16).needs_loss_scaling
    assert trainer.accelerator.scaler.get_scale() == 2.0**7  # about 20 thousand parameters


def test_schedule_switches_and_evaluation_is_fp32(tmp_path):
    model = llama()
    trainer, _ = trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=3, eval_dataset=Rows())
    seen = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda m, args, out: seen.append((m.training, m.compute_dtype, m.round_tf32)))
    attach(trainer, "bf16_mixed", start_mode="tf32", start_fraction=0.5)
    trainer.train()
    training = [entry[1:] for entry in seen if entry[0]]
    assert training == [(torch.float32, True)] * 2 + [(torch.bfloat16, False)] * 2
    assert {entry[1:] for entry in seen if not entry[0]} == {(torch.float32, False)}
    assert layer.compute_dtype == torch.bfloat16


def test_pure_fp16_trains_with_our_optimizer_only(tmp_path):
    trainer, _ = trainer_of(llama(), tmp_path)
    with pytest.raises(ConfigError, match="keeps no FP32 masters"):
        attach(trainer, "pure_fp16")
    settings = {"lr": 1e-3, "weight_decay": 0.0}
    trainer, log = trainer_of(llama(), tmp_path, optimizer_cls_and_kwargs=(tilewright.DeepSeekAdam, settings))
    attach(trainer, "pure_fp16")
    trainer.train()
    want = plain_losses(llama(), trainer_of(llama(), tmp_path)[0])
    assert log.losses == pytest.approx(want, rel=1e-2)
    assert trainer.model.lm_head.weight.dtype == torch.float16


def test_two_tools_cannot_decide_one_thing(tmp_path):
    trainer, _ = trainer_of(llama(), tmp_path, bf16=True)
    with pytest.raises(ConfigError, match="own mixed precision is on"):
        attach(trainer, "bf16_mixed")


# ---- the precision controller ----

EVERY_STEP = ControllerSettings(budget=1.0, interval=1, cooldown=1, patience=1, recalibrate_interval=1000)


def wide_llama():
    """Large enough for a tile to hold one outlier and much that is small."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "hidden_size": 128}, num_key_value_heads=2))
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[0] = 2.0**24
    return model


def test_a_controller_moves_what_needs_it_and_writes_it_down(tmp_path):
    trainer, log = trainer_of(wide_llama(), tmp_path)
    attach(trainer, Policy("fp8_tile", bf16_grad_layers=()), control=EVERY_STEP)
    trainer.train()
    history = read_history(tmp_path)
    assert [sample.step for sample in history.samples] == [1, 2, 3, 4]
    first = {(move.layer, move.gemm) for move in history.moves if move.step == 1}
    assert ("model.layers.1.mlp.gate_proj", "fprop") in first
    assert ("model.layers.0.mlp.gate_proj", "fprop") not in first
    assert 0 < trainer.state.log_history[0]["above_8bit"] < 1
    assert not trainer.model.model.layers[0].mlp.gate_proj._forward_hooks
    assert len(log.losses) == STEPS


def test_a_calm_training_equals_one_without_a_controller(tmp_path):
    weights = []
    for control in (None, EVERY_STEP):
        trainer, _ = trainer_of(llama(), tmp_path)
        attach(trainer, Policy("fp8_tile", keep="value"), control=control)
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_step_that_is_not_finite_is_dropped(tmp_path):
    trainer, _ = trainer_of(llama(), tmp_path, max_grad_norm=0.0)
    norm = trainer.model.model.norm
    norm.register_buffer("passes", torch.zeros(()))
    norm.register_forward_pre_hook(lambda module, _: (module.passes.add_(1), None)[1])
    seen = []

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(trainer.model.model.norm.weight.detach().clone())
            if state.global_step == 2:
                trainer.model.model.norm.weight.grad[0] = float("nan")

    trainer.add_callback(Spoil())
    attach(trainer, "fp8_tile", control=EVERY_STEP)
    trainer.train()
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[1], seen[2])
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    assert trainer.state.log_history[-1]["dropped_steps"] == 1
    assert norm.passes == STEPS - 1, "the dropped step's pass is still counted"


def test_a_controller_goes_on_from_the_trainers_checkpoint(tmp_path):
    resumable = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": True}
    found = []
    for run, folder in (("straight", tmp_path / "a"), ("resumed", tmp_path / "b")):
        trainer, _ = trainer_of(wide_llama(), folder, **resumable)
        attach(trainer, Policy("fp8_tile", bf16_grad_layers=()), control=EVERY_STEP)
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2") if run == "resumed" else None)
        (callback,) = [call for call in trainer.callback_handler.callbacks if isinstance(call, ControllerCallback)]
        found.append((callback.control.controller.formats(), callback.control.state_dict()))
    assert found[0] == found[1]
    assert set(found[0][0].values()) > {"fp8_tile"}


def test_a_controller_needs_fp8(tmp_path):
    trainer, _ = trainer_of(llama(), tmp_path)
    with pytest.raises(ConfigError, match="No FP8 layer for the controller to move"):
        attach(trainer, "bf16_mixed", control=EVERY_STEP)


def first_loss(folder, *, attached: bool, mended: bool, **changes) -> float:
    """BERT's loss of one step of four rows, as Trainer logs it."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1} | changes
    trainer, log = trainer_of(bert(), folder, **settings)
    trainer.train_dataset = Masked()
    if attached:
        attach(trainer, "fp32")
    if mended:
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return log.losses[0]


@pytest.mark.parametrize("attached", [False, True])
def test_trainer_adds_up_the_means_of_a_masked_model_unless_it_is_mended(attached, tmp_path):
    """Where this fails since the first loss is right, transformers is mended: `attach` need not say it."""
    mended = first_loss(tmp_path / "a", attached=attached, mended=True)
    assert first_loss(tmp_path / "b", attached=attached, mended=False) == pytest.approx(4 * mended, rel=1e-3)
    assert 0.8 < mended / torch.log(torch.tensor(80.0)) < 1.2


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss / 4


def test_a_loss_that_is_added_up_is_said_with_what_helps(tmp_path, capsys):
    def said(make=bert, kind=Trainer, **settings):
        args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **settings)
        attach(kind(make(), args, train_dataset=Masked()), "fp32")
        return " ".join(capsys.readouterr().err.split())

    note = said(gradient_accumulation_steps=4)
    assert note.count("note:") == 1
    assert "BertForMaskedLM" in note
    assert "4 times too large" in note
    assert "trainer.model_accepts_loss_kwargs = False" in note
    assert said(gradient_accumulation_steps=1) == ""
    assert said(llama, gradient_accumulation_steps=4) == ""
    assert said(kind=OwnLoss, gradient_accumulation_steps=4) == ""
    assert said(gradient_accumulation_steps=4, label_smoothing_factor=0.1) == ""
