"""Training throughput and peak memory of one model of about 50M parameters, in turns on one machine.

Contenders, each in a process of its own that stays alive and takes a few steps when it is its turn, so that
every round compares them under the same conditions:
  fp32      a plain PyTorch loop over Hugging Face's Llama, FP32, fused AdamW
  autocast  the same under BF16 autocast
  trainer   Hugging Face's Trainer with bf16, torch_compile and the fused AdamW: its documentation's fastest settings
  trainer_tuned  the same in a process with huge pages and short spinning, which `tilewright train` sets for itself
  tilewright  our decoder under bf16_mixed through the standard executor, layers compiled
  tilewright_hf, tilewright_hf_eager  the very Llama of the first three, its layers compiled by us or not
and the steps that lead there and beyond (the ladder of the README): tilewright without compilation, in fp8_tile (which
a CPU can only emulate), with BF16 moments, and with layers recomputed in the backward pass.
All take the same rows (no padding, one document a row), batch 8 x 512, vocabulary 16384, clip norm 1. With
`--wide` it is a model of 0.6B parameters and 2 x 2048 tokens, for a GPU.

python -m benchmarks.runs.throughput [--rounds 5] [--only CONTENDER ...] [--wide] [--tiny]
"""

import functools
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import Deadline, machine_kind, parser_of, spread, write_result
from benchmarks.loops import hf_llama, hf_trainer, random_decoder, standard_executor
from benchmarks.turns import ratio
from benchmarks.worker import Turns, TurnTaker, contest, take_turns, tell
from tilewright.core.env import tune_cpu_runtime

CLAIM = "BF16 training at least 3x a plain FP32 PyTorch loop, and at least 1.3x the Hugging Face Trainer with bf16"


@dataclass(frozen=True)
class Shape:
    """The model, and the rows of a step."""

    rows: int = 8
    seq: int = 512
    vocab: int = 16384
    dim: int = 512
    layers: int = 12
    heads: int = 8
    ffn: int = 1408

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.seq

    def batch(self, step: int) -> torch.Tensor:
        """The token rows of a step, [rows, seq + 1], the same for every contender."""
        return torch.randint(0, self.vocab, (self.rows, self.seq + 1), generator=torch.Generator().manual_seed(step))


TINY = Shape(2, 32, 512, 64, 2, 2, 128)
WIDE = Shape(2, 2048, 32768, 2048, 8, 16, 8192)
WARMUP, STEPS = 3, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def hf_model(shape: Shape):
    """Hugging Face's Llama of the contest's shape."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"dim": shape.dim, "ffn": shape.ffn, "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.heads}
    return LlamaForCausalLM(hf_llama(shape.vocab, shape.seq, **sizes)).to(DEVICE)


def peak_bytes() -> int:
    """Most memory used so far: of the GPU, or resident memory of this process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def turns(step: Callable[[int], object]) -> None:
    """Answer each line on stdin with the seconds of a step, of STEPS steps, after a warm-up at the start."""
    counts = itertools.count()

    def turn(_: int) -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(STEPS):
            step(next(counts))
        return measured(start)

    for _ in range(WARMUP):
        step(next(counts))
    synchronize()
    tell({})
    take_turns(turn)


def measured(start: float) -> dict[str, float]:
    """Seconds a step of the turn that began at `start`, and peak bytes."""
    synchronize()
    return {"step_s": (time.perf_counter() - start) / STEPS, "peak_bytes": peak_bytes()}


def run_plain(shape: Shape, dtype: torch.dtype | None) -> None:
    """A plain loop, FP32 or under autocast."""
    model = hf_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER, fused=True)

    def step(count: int) -> None:
        batch = shape.batch(count).to(DEVICE)
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not None):
            logits = model(input_ids=batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    turns(step)


def run_trainer(shape: Shape) -> None:
    """Hugging Face's Trainer, told by a callback when it is its turn."""
    import tempfile

    from transformers import TrainerCallback

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = shape.batch(index // shape.rows)[index % shape.rows]
            return {"input_ids": row[:-1], "labels": row[:-1]}  # the model shifts the labels itself

    class Turns(TrainerCallback):
        def __init__(self) -> None:
            self.done, self.start = 0, 0.0

        def on_step_end(self, args, state, control, **kwargs):
            self.done += 1
            if self.done < WARMUP or (self.done - WARMUP) % STEPS:
                return
            if self.done == WARMUP:
                synchronize()
                tell({})
            else:
                tell(measured(self.start))
            if not sys.stdin.readline():
                control.should_training_stop = True
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        hf_trainer(
            hf_model(shape), Rows(), folder, Turns(), per_device_train_batch_size=shape.rows, max_steps=10**5,
            torch_compile=True, optim="adamw_torch_fused", learning_rate=HYPER["lr"], logging_steps=10**9,
        ).train()  # fmt: skip


def run_tilewright(
    shape: Shape, *, mode: str = "bf16_mixed", compiled: bool = True, moments: str = "fp32", recompute: str = "none",
    foreign: bool = False,
) -> None:  # fmt: skip
    """Our decoder (`foreign`: the Llama of the others), policy, optimizer and executor."""
    from tilewright.core.hardware import detect_machine
    from tilewright.models.hf.model import HFModel
    from tilewright.ops.kernels import Kernels

    kernels = Kernels(detect_machine(), compile=compiled)
    if foreign:
        model = HFModel(hf_model(shape), "causal_lm", kernels)
    else:
        sizes = {"dim": shape.dim, "num_layers": shape.layers, "num_heads": shape.heads, "ffn_dim": shape.ffn}
        model = random_decoder(shape.vocab, kernels, DEVICE, **sizes)
    model.activation_checkpoint = recompute
    executor = standard_executor(
        model, kernels, DEVICE, mode=mode, compiled=compiled, lr=HYPER["lr"], moments=moments
    )  # fmt: skip

    def step(count: int) -> None:
        batch = shape.batch(count)
        executor.step([{"input_ids": batch[:, :-1], "labels": batch[:, 1:].contiguous()}], lr=HYPER["lr"])

    turns(step)


RUNS = {
    "fp32": functools.partial(run_plain, dtype=None),
    "autocast": functools.partial(run_plain, dtype=torch.bfloat16),
    "trainer": run_trainer,
    "trainer_tuned": run_trainer,
    "tilewright_eager": functools.partial(run_tilewright, compiled=False),
    "tilewright": run_tilewright,
    "tilewright_hf": functools.partial(run_tilewright, foreign=True),
    "tilewright_hf_eager": functools.partial(run_tilewright, foreign=True, compiled=False),
    "tilewright_fp8": functools.partial(run_tilewright, mode="fp8_tile"),
    "tilewright_bf16_moments": functools.partial(run_tilewright, moments="bf16"),
    "tilewright_recompute": functools.partial(run_tilewright, moments="bf16", recompute="full"),
}
CONTENDERS = tuple(RUNS)
PLAIN = ("fp32", "autocast", "trainer")
"""Contenders in the environment as it is."""


def start_all(names: Sequence[str], flags: Sequence[str]) -> dict[str, TurnTaker]:
    """The contenders' processes, warmed up."""
    plain = dict(os.environ)
    tune_cpu_runtime()  # as `tilewright train` does for itself; a peer gets it in a row of its own
    takers = {}
    for name in names:
        environ = plain if name in PLAIN else None
        takers[name] = TurnTaker(name, "runs.throughput", "--worker", name, *flags, environ=environ)
        takers[name].answer()
        print(f"{name}: ready", flush=True)
    return takers


def main() -> None:
    """Run the contest, or one contender of it."""
    parser = parser_of(__doc__, tiny=True, seconds=True, rounds=7)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--worker", choices=CONTENDERS)
    parser.add_argument("--wide", action="store_true", help="a model of 0.6B parameters, for a GPU")
    args = parser.parse_args()
    shape = TINY if args.tiny else WIDE if args.wide else Shape()
    if args.worker:
        RUNS[args.worker](shape)
        return
    kind = machine_kind()
    size = "tiny" if args.tiny else f"wide_{kind}" if args.wide else kind

    def after(turns: Turns) -> None:
        print(json.dumps({name: round(rows[-1]["step_s"], 3) for name, rows in turns.items()}), flush=True)
        write_result(f"throughput_{size}", CLAIM, compared(shape, turns))

    flags = ["--tiny"] if args.tiny else ["--wide"] if args.wide else []
    contest(start_all(args.only, flags), args.rounds, after, Deadline(args.seconds))


def compared(shape: Shape, turns: Turns) -> dict[str, object]:
    """Tokens per second of each contender, and ours over the others, round by round."""
    results: dict[str, object] = {"unit": "tokens/s", "tokens_per_step": shape.tokens}
    samples = {name: [row["step_s"] for row in rows] for name, rows in turns.items()}
    for name, times in samples.items():
        rates = spread([shape.tokens / taken for taken in times])
        results[name] = rates | {"peak_bytes": turns[name][-1]["peak_bytes"]}
    for name, times in samples.items():
        for ours in {"tilewright", "tilewright_hf"} & samples.keys() - {name}:
            results[f"{ours} over {name}"] = over = ratio(times, samples[ours])
            print(f"{ours} over {name}: {over['median']:.2f}x")
    return results


if __name__ == "__main__":
    main()
