"""linear_cross_entropy: the language-model head and its loss as one operation.

loss = sum over labels != -100 of -log softmax(x_ND @ weight_VD.T)[label]; GEMMs in x's dtype, softmax in FP32. Any
other label that is no class is a LabelError. Rows without a target leave no trace, whatever their logits are.
Returns `TokenLosses`: (loss sum, number of targets, loss of each row [N]). At most `tile_bytes` of logits are in memory
at once, or those of one row, in forward and in backward; the reference holds them all.
"""

from tilewright.ops.backends.native import loss as native
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Op, always, needs_compiler

LINEAR_CROSS_ENTROPY = Op(
    "cross_entropy",
    (
        Candidate("compiled", native.compiled, needs_compiler),
        Candidate("native", native.eager, always),
        Candidate("ref", ref.linear_cross_entropy, always),
    ),
    in_transforms=ref.linear_cross_entropy,
)
