"""attention: softmax(q k^T * scale) v, causal, never across documents.

q [B, H, S, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv] with H a multiple of Hkv (grouped-query) and Dv <= Dk;
segments [B, S] integers or None: a position sees earlier positions of its own segment only.
scale defaults to Dk^-0.5. Softmax in FP32. Returns [B, H, S, Dv] in q's dtype.
block: query rows at a time, so that neither scores nor mask are S x S; 0 lets torch's kernels decide. The reference
holds all. Changes memory and time, not the result.
"""

from tilewright.ops.dispatch import Candidate, Op, always
from tilewright.ops.native import attention as native
from tilewright.ops.ref import math as ref

ATTENTION = Op("attention", (Candidate("native", native.attention, always), Candidate("ref", ref.attention, always)))
