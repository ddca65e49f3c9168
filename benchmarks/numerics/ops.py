"""Our candidates for attention and cross-entropy beside torch's own, forward and backward, in one process.

python -m benchmarks.numerics.ops [--tiny]
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.card.device_time import CudaClock, device_ms
from benchmarks.common import Deadline, machine_kind, parser_of, restart_tuned, spread, write_result
from benchmarks.turns import in_turns, ratio
from tests.ops.cases import AttentionCase
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels

CLAIM = (
    "attention and linear layers take less time than torch's own, forward and backward; the loss no more, "
    "with less memory"
)
ROUNDS = 9
DEVICE = detect_machine().device


def pairs(runs: dict[str, Callable[[], None]]) -> dict[str, object]:
    """Each run in turn, ROUNDS times after two warm-ups; on a GPU the device's time of each, see `device_time`."""
    if DEVICE == "cuda":
        clock = CudaClock()
        result: dict[str, object] = {name: device_ms(run, clock) for name, run in runs.items()}
        samples = {name: found["samples"] for name, found in result.items()}
    else:
        samples = {name: [1e3 * taken for taken in each] for name, each in in_turns(runs, ROUNDS).items()}
        result = {name: spread(times) for name, times in samples.items()}
    ours, theirs = samples.values()
    result["speedup"] = ratio(theirs, ours)
    return result


def attention(case: AttentionCase, dtype: torch.dtype) -> dict[str, object]:
    """Our attention inside a compiled function, against compiled and masked SDPA."""
    q, k, v, segments = (None if t is None else t.detach().to(DEVICE) for t in case.tensors(dtype))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    kernels = Kernels.default()
    documents = kernels.documents({} if segments is None else {"segments": segments})

    def torch_attention(q, k, v):
        if segments is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        same = segments[:, :, None] == segments[:, None, :]
        allowed = same & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])

    ours = torch.compile(lambda q, k, v: kernels.attention(q, k, v, segments=documents))
    theirs = torch.compile(torch_attention)
    out_grad = torch.randn_like(q)
    return pairs(
        {
            "tilewright": lambda: torch.autograd.grad(ours(q, k, v), leaves, out_grad),
            "torch": lambda: torch.autograd.grad(theirs(q, k, v), leaves, out_grad),
        }
    )


def linear(num_tokens: int, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, object]:
    """Our linear layer with an FP32 weight inside a compiled function, against torch's compiled so."""
    x = torch.randn(num_tokens, num_in, dtype=dtype, device=DEVICE).requires_grad_()
    weight = (torch.randn(num_out, num_in, device=DEVICE) / num_in**0.5).requires_grad_()
    out_grad = torch.randn(num_tokens, num_out, dtype=dtype, device=DEVICE)
    kernels = Kernels.default()
    ours = torch.compile(lambda x, w: kernels.linear(x, w))
    theirs = torch.compile(lambda x, w: F.linear(x, w.to(dtype)))
    return pairs(
        {
            "tilewright": lambda: torch.autograd.grad(ours(x, weight), (x, weight), out_grad),
            "torch": lambda: torch.autograd.grad(theirs(x, weight), (x, weight), out_grad),
        }
    )


def cross_entropy(num_tokens: int, dim: int, vocab: int, dtype: torch.dtype) -> dict[str, object]:
    """Head and loss as one operation, against a compiled linear and cross-entropy."""
    x = torch.randn(num_tokens, dim, dtype=dtype, device=DEVICE).requires_grad_()
    weight = (torch.randn(vocab, dim, device=DEVICE) / dim**0.5).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), device=DEVICE)
    kernels = Kernels.default()
    theirs = torch.compile(lambda x, w: F.cross_entropy((x @ w.to(dtype).T).float(), labels, reduction="sum"))
    return pairs(
        {
            "tilewright": lambda: torch.autograd.grad(kernels.linear_cross_entropy(x, weight, labels)[0], (x, weight)),
            "torch": lambda: torch.autograd.grad(theirs(x, weight), (x, weight)),
        }
    )


def main() -> None:
    """Run all cases and write the result, in the environment that `tilewright train` makes for itself."""
    parser = parser_of(__doc__, tiny=True, seconds=True)
    args = parser.parse_args()
    restart_tuned()
    length, tokens, vocab = (64, 64, 512) if args.tiny else (512, 4096, 16384)
    case = AttentionCase(8, 8, 8, length, 64, 64)
    packed = AttentionCase(8, 8, 8, length, 64, 64, docs=4)
    low = torch.bfloat16
    cases: dict[str, Callable[[], dict[str, object]]] = {
        f"attention 8x8x{length}x64 bf16": lambda: attention(case, low),
        f"attention 8x8x{length}x64 bf16, packed documents": lambda: attention(packed, low),
        f"linear {tokens}x512x1408 bf16": lambda: linear(tokens, 512, 1408, low),
        f"linear {tokens}x1024x4096 bf16": lambda: linear(tokens, 1024, 4096, low),
        f"loss {tokens}x512x{vocab} bf16": lambda: cross_entropy(tokens, 512, vocab, low),
    }
    deadline, results = Deadline(args.seconds), {"unit": "ms, forward and backward"}
    for name, run in cases.items():
        if deadline.passed(name, results):
            break
        results[name] = result = run()
        print(f"{name:<45}", " ".join(f"{k} {v['median']:.2f}" for k, v in result.items()))
        write_result(f"ops_{'tiny' if args.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
