"""Masks for masked language modelling, as in BERT (Devlin et al. 2018, section 3.1), without a random generator.

15 % of the tokens become targets: of these 80 % are replaced by the mask token, 10 % by a random token, 10 % stay.
What is masked depends only on (seed, sample index, position): the same sample is masked alike on any rank and after a
resume, and differently in its next epoch, where its sample index is another.
"""

import numpy as np

from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.common.hashing import hash64

TARGET_SHARE = 0.15
_MASKED, _RANDOM = 0.8, 0.9  # below the first: mask token; below the second: random token; else unchanged


def mask_tokens(
    batch: dict[str, np.ndarray],
    *,
    seed: int,
    samples_B: np.ndarray,
    mask_id: int,
    special_ids: tuple[int, ...],
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """The batch with masked inputs for masked language modelling, and labels only where something is to be predicted.

    Special tokens and padding are never targets. A row that has a plain token has at least one target.

    Args:
        batch: input_ids and labels [B, S] of `TextRows` with `shifted=False`.
        seed: of the run.
        samples_B: sample index of each row.
        mask_id, special_ids, vocab_size: of the tokenizer.
    """
    ids_BS = batch["input_ids"]
    key_BS = hash64(hash64(seed, samples_B)[:, None], np.arange(ids_BS.shape[1])[None, :])
    chance_BS = _uniform(hash64(key_BS, 1))
    plain_BS = (batch["labels"] != IGNORE) & ~np.isin(ids_BS, special_ids)
    chance_BS[~plain_BS] = 2.0
    target_BS = (chance_BS < TARGET_SHARE) | (chance_BS == chance_BS.min(1, keepdims=True))
    target_BS &= plain_BS
    kind_BS = _uniform(hash64(key_BS, 2))
    random_BS = (hash64(key_BS, 3) % np.uint64(vocab_size)).astype(np.int64)
    replaced_BS = np.where(kind_BS < _MASKED, mask_id, np.where(kind_BS < _RANDOM, random_BS, ids_BS))
    return batch | {
        "input_ids": np.where(target_BS, replaced_BS, ids_BS),
        "labels": np.where(target_BS, batch["labels"], IGNORE),
    }


def _uniform(x: np.ndarray) -> np.ndarray:
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
