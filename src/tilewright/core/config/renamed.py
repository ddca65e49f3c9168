"""Names and values that settings had before 0.1, for the loader's answer. They are not accepted."""

from typing import Any

SETTINGS = {
    "train.batch_size": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "train.log_every": "train.log_interval",
    "train.eval_every": "train.eval_interval",
    "save.every": "checkpoint.interval",
    "save.last": "checkpoint.save_last",
    "save.keep": "checkpoint.keep_latest_k",
    "save.background": "checkpoint.async_save",
    "save.resume": "checkpoint.resume",
    "save.export_hf": "checkpoint.export_hf",
    "save.export_format": "checkpoint.export_format",
    "memory.group": "memory.layers_per_group",
    "memory.parameters": "memory.offload_params",
    "memory.states": "memory.offload_optimizer",
    "memory.inputs": "memory.offload_activations",
    "memory.tier_dir": "memory.offload_dir",
    "memory.undo": "memory.rollback",
    "memory.mlp_tiles": "memory.mlp_chunks",
    "memory.loss_tile": "memory.loss_chunk_bytes",
    "optim.master": "optim.master_weights",
    "precision.decouple": "precision.bf16_grad_layers",
    "precision.lr_noise": "precision.lr_noise_damping",
    "precision.controller_policy": "precision.controller.granularity",
    "precision.controller_budget": "precision.controller.budget",
    "precision.controller_every": "precision.controller.interval",
    "precision.controller_cooldown": "precision.controller.cooldown",
    "precision.controller_quiet": "precision.controller.patience",
    "precision.controller_recalibrate": "precision.controller.recalibrate_interval",
    "precision.controller_redo": "precision.controller.retry_steps",
    "precision.controller_spike_factor": "precision.controller.spike_factor",
    "plan.device_budget": "plan.device_memory",
    "precision.controller": "precision.controller.enabled",
}
"""Old name -> name."""
SECTIONS = frozenset({"save"})
"""Sections that are gone. Their settings have other names."""
_OFFLOAD = {"device": "none", "host": "cpu"}
_VALUES = {
    "optim.clip": {"exact": "two_pass", "lagged": "delayed"},
    "train.activation_checkpoint": {"products": "matmuls"},
    "memory.rollback": {"journal": "buffer"},
    "memory.offload_params": _OFFLOAD,
    "memory.offload_optimizer": _OFFLOAD,
    "memory.offload_activations": _OFFLOAD,
}


def value(setting: str, old: Any) -> str | None:
    """What an old value of a setting is called now; None where it is no old value."""
    return _VALUES.get(setting, {}).get(old) if isinstance(old, str) else None
