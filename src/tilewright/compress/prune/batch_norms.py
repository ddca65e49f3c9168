"""Batch norms behind a cut: their statistics are those of the smaller model.

Running means and variances were taken in the uncut model. A sum over fewer channels has another mean and less variance,
and each layer makes that worse for the next. So all batch norms measure them again, each on what the ones before it
give out then: the mean over batches in training mode, without a step (Wu and Johnson, "Rethinking 'Batch' in
BatchNorm", 2021, section 3).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tilewright.compress.prune.cut_model import short_batch
from tilewright.compress.prune.unit_readers import Batch
from tilewright.core.errors import ConfigError
from tilewright.models.base.eval_mode import evaluation


@torch.no_grad()
def estimate_norms(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Estimate the running statistics of a pruned model's batch norms, in place. Nothing else of the model changes.

    Args:
        model: after a cut.
        batches: text or images, at least one.

    Raises:
        ConfigError: a norm gets one value per channel, which has no variance.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    told: Any = model
    with evaluation(model):
        told.loss(short_batch(told))  # models of transformers try their inputs out in the first loss
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over batches
            norm.train()
        checks = [norm.register_forward_pre_hook(_check_values) for norm in norms]
        try:
            for batch in batches:
                told.loss(batch)
        finally:
            for check in checks:
                check.remove()
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()


def _check_values(norm: nn.Module, args: tuple[Any, ...]) -> None:
    x = args[0]
    if x.shape[0] * x[0, 0].numel() > 1:
        return
    raise ConfigError(
        "Batch norm gets one value per channel",
        got=f"one row whose channels are {list(x.shape[2:]) or 'single numbers'} there",
        need="two values at least: their mean and variance are measured again behind a cut",
        try_="--train.micro_batch_size 2, or larger images",
        where="train.micro_batch_size",
    )
