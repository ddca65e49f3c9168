"""attention: softmax(q k^T * scale) v, causal, never across documents.

q [B, H, S, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv] with H a multiple of Hkv (grouped-query);
segments [B, S] integers or None: a position sees earlier positions of its own segment only.
scale defaults to Dk^-0.5. Softmax in FP32. Returns [B, H, S, Dv] in q's dtype.
"""

from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.dispatch import Candidate, Op, always
from tilewright.ops.ref import math as ref


def native(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, segments_BS: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention."""
    grouped = q_BHSD.shape[1] != k_BHSD.shape[1]
    if segments_BS is None:
        return F.scaled_dot_product_attention(
            q_BHSD, k_BHSD, v_BHSD, is_causal=True, scale=scale, enable_gqa=grouped
        )
    allowed = ref.allowed_pairs(segments_BS, q_BHSD.shape[2], q_BHSD.device)
    return F.scaled_dot_product_attention(
        q_BHSD, k_BHSD, v_BHSD, attn_mask=allowed, scale=scale, enable_gqa=grouped
    )


ATTENTION = Op("attention", (Candidate("native", native, always), Candidate("ref", ref.attention, always)))
