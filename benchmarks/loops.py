"""Training loops that several programs compare: ours without a run around it, and those that a user has without us."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def token_batch(vocab: int, rows: int, seq: int, seed: int) -> Batch:
    """A micro-batch of random tokens, [rows, seq]."""
    ids = torch.randint(0, vocab, (rows, seq + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}


# ---- ours ----


def random_decoder(vocab: int, kernels: Any, device: str, **shape: Any) -> Any:
    """tilewright's decoder with first weights.

    Args:
        shape: fields of `[model]`.
    """
    from tilewright.core.config.sections.model import ModelSection
    from tilewright.models.build import build_model, init_weights

    model = build_model(ModelSection(**shape), vocab, kernels, device)
    init_weights(model, 0)
    return model


def standard_executor(
    model: Any, kernels: Any, device: str, *, mode: str = "", compiled: bool = True, lr: float = 3e-4,
    moments: str = "fp32", memory_tracker: Any = None,
) -> Any:  # fmt: skip
    """Precision, AdamW and the standard executor around a model.

    Args:
        mode: of the precision; "": the model stays as it is.
        compiled: its layers are.
        lr, moments: of the optimizer.
        memory_tracker: that counts its bytes.
    """
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.param_groups import decay_groups
    from tilewright.precision.convert import convert
    from tilewright.precision.float8.weight_cache import QuantizedWeights
    from tilewright.training.executor.standard import StandardExecutor

    if mode:
        convert(model, mode, kernels=kernels)
    if compiled:
        model.compile_blocks()
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), lr=lr, moments=moments, kernels=kernels)  # type: ignore[arg-type]
    QuantizedWeights(model, optimizer)
    return StandardExecutor(model, optimizer, clip=GradClip(1.0), device=device, memory_tracker=memory_tracker)


def executor_of(recipe: Any, compiled: bool, folder: Path) -> Any:
    """Model, AdamW and executor of a recipe on a CPU, standard or layer by layer, without its data.

    Args:
        compiled: layers are.
        folder: of what is kept on disk.
    """
    from tilewright.core.hardware import detect_machine
    from tilewright.memory.chunked_mlp import chunk_mlps
    from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
    from tilewright.memory.tracking.tracker import MemoryTracker
    from tilewright.models.build import build_model, init_weights
    from tilewright.ops.kernels import Kernels
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.param_groups import decay_groups
    from tilewright.parallel.world import World
    from tilewright.precision.convert import convert
    from tilewright.precision.policy.policy import Policy
    from tilewright.training.components.model import first_values
    from tilewright.training.executor.base import ExecutorInputs
    from tilewright.training.executor.executor_kinds import layer_major_executor
    from tilewright.training.executor.standard import StandardExecutor

    memory, optim = recipe.memory, recipe.optim
    sizes = {"loss_chunk_bytes": memory.loss_chunk_bytes, "attention_block": memory.attention_block}
    kernels = Kernels(detect_machine("cpu"), compile=compiled, **sizes)
    sliced = memory.can.offload
    model = build_model(recipe.model, recipe.data.vocab_size, kernels, "meta" if sliced else "cpu")
    values = first_values(recipe, model) if sliced else None
    if values is None:
        init_weights(model, recipe.run.seed)
    parameters = "" if optim.master_weights == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=kernels)
    if values is not None:
        to_placeholders(model, "cpu")
        fill_buffers(model, values)
    model.train()
    model.activation_checkpoint = recipe.train.activation_checkpoint
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    if compiled:
        model.compile_blocks()
    if memory.mlp_chunks > 1:
        chunk_mlps(model, memory.mlp_chunks, print, compile=compiled)
    optimizer = DeepSeekAdam(
        decay_groups(model, optim.weight_decay), lr=optim.lr, betas=optim.betas, moments=optim.moments,
        master=optim.master_weights, kernels=kernels,
    )  # fmt: skip
    clip = GradClip(optim.clip_norm)
    if not sliced:
        return StandardExecutor(model, optimizer, clip=clip)
    tracker = MemoryTracker("cpu")
    return layer_major_executor(
        ExecutorInputs(
            recipe, model, optimizer, None, clip, None, None, tracker, kernels, World.alone(), folder, values
        )
    )


# ---- Hugging Face's ----


def hf_llama(vocab: int, seq: int, *, dim: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    """The configuration of a Llama with tied embeddings.

    Args:
        more: other fields of it.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=seq, tie_word_embeddings=True, use_cache=False, **more,
    )  # fmt: skip


def hf_trainer(model: Any, rows: Any, folder: str, callback: Any, **more: Any) -> Any:
    """Hugging Face's Trainer in BF16 that prints, saves and evaluates nothing.

    Args:
        rows: a dataset of `input_ids` and `labels`; the model shifts the labels itself.
        folder: that it may write to.
        callback: see `StepClock`.
        more: other arguments of training.
    """
    from transformers import Trainer, TrainingArguments

    arguments: Mapping[str, Any] = {
        "bf16": True, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "dataloader_drop_last": True, "include_num_input_tokens_seen": "no",
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    return Trainer(model, TrainingArguments(folder, **(arguments | more)), train_dataset=rows, callbacks=[callback])


def step_clock() -> Any:
    """A callback of the Trainer with the times of its steps' ends, the start first, and the losses that it logs."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.times, self.losses = [time.perf_counter()], list[float]()

        def on_step_end(self, args, state, control, **kwargs):
            self.times.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.losses += [float(logs["loss"])] if "loss" in logs else []

    return StepClock()
