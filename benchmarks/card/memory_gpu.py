"""Models that are too big for their card: 42 billion parameters on one, and 8 billion beside other tools' offloading.

Parts, each a command of its own; results are written after every step, so that a part cut short keeps what it has:
  largest   recipe slice_42b_h200: all parameters trained, 8k tokens per step; loss, tokens/s, device and host peak, and
            the plan's prediction beside them
  offload   an 8B-shaped decoder, the same rows of text: layer-major with 8-bit states on the host, FSDP2 with
            `CPUOffloadPolicy`, torchao's `CPUOffloadOptimizer`; all with BF16 parameters and recomputed layers;
            `--device-gib 24` does it in the memory of a consumer card
  limit     the most layers of the 42B recipe that the plan fits into this machine, and two steps of them

Floors use the rates of one H200 that were measured before: 790 TFLOP/s BF16; and 50 GB/s of its link (assumed).

python -m benchmarks.card.memory_gpu largest|offload|limit [--steps 20] [--seconds 220] [--device-gib 24] [--tiny]
"""

import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.common import Deadline, arguments_for_card, parser_of, spread, write_result
from benchmarks.worker import call_worker
from tilewright.core.config.load import load_recipe
from tilewright.data.batches.microbatches import Batch, count_targets, count_tokens
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_parameters
from tilewright.models.decoder.init import initial_rules
from tilewright.training.assemble import RunContext, build, set_up
from tilewright.training.executor.base import StepResult

CLAIMS = {
    "largest": "42B parameters, all trained, on one H200: 20 steps or more of 8k tokens, loss falling, at most 130 GiB "
    "of the device and 100 GiB of the host, at least 1,100 tokens/s",
    "offload": "8B parameters: layer_major against the best of FSDP2 CPU offload and torchao's CPUOffloadOptimizer",
    "limit": "the largest decoder of the 42B recipe's width that trains on this machine",
}
RATES = {"bf16_flops": 790e12, "link_bytes": 50e9}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTENDERS = ("layer_major", "fsdp2_offload", "torchao_offload")
EIGHT_B = {
    "model.dim": "4096", "model.num_layers": "32", "model.num_heads": "32", "model.num_kv_heads": "8",
    "model.ffn_dim": "14336", "model.tie_embeddings": "false", "data.seq_len": "4096", "train.global_batch_size": "8",
    "train.micro_batch_size": "2",
}  # fmt: skip
SLICED = {
    "memory.executor": "layer_major",
    "memory.offload_optimizer": "cpu",
    "optim.moments": "8bit",
    "optim.master_weights": "stochastic",
    "optim.clip": "delayed",
    "memory.rollback": "checkpoint",
}
TINY = {
    "run.device": "auto",
    "model.dim": "64", "model.num_layers": "3", "model.num_heads": "4", "model.num_kv_heads": "2",
    "model.ffn_dim": "128", "data.seq_len": "64", "data.vocab_size": "512", "data.max_bytes": "2MB",
    "train.global_batch_size": "4", "train.micro_batch_size": "2", "train.compile": "off",
}  # fmt: skip


def setup_of(recipe: str, settings: dict[str, str], tiny: bool, *, keep: bool = False) -> RunContext:
    """Machine, data and plan; a plan that says "does not fit" is reported and not obeyed.

    Args:
        keep: `settings` also where the tiny ones say something else.
    """
    asked = {**settings, "plan.enforce": "false", "optim.warmup_steps": "2"} | (TINY if tiny else {})
    settings = asked | (settings if keep else {})
    return set_up(load_recipe(recipe, settings, environ={}))


def floor(parameters: int, tokens: int) -> dict[str, float]:
    """Seconds of a step at the given rates: matmuls with every layer computed twice forward, and 8-bit states over
    the link, there and back."""
    return {
        "products_s": 8 * parameters * tokens / RATES["bf16_flops"],
        "states_each_way_s": 2.03 * parameters / RATES["link_bytes"],
    }


def host_peak_bytes() -> int:
    """Largest resident set of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_peak_bytes() -> int:
    """Most bytes that torch held on the device; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


# ---- 42 billion ----


def largest_part(steps: int, tiny: bool, deadline: Deadline) -> None:
    """Train the recipe, and write after each step."""
    train_layers("largest", {}, steps, tiny, deadline)


def limit_part(steps: int, tiny: bool, deadline: Deadline) -> None:
    """As many layers as the plan fits, found by halving."""
    fits, over = 1, 8 if tiny else 160
    while over - fits > 1:
        number = (fits + over) // 2
        plan = setup_of("slice_42b_h200", {"model.num_layers": str(number)}, tiny, keep=True).plan
        fits, over = (number, over) if plan.state == "fits" else (fits, number)
        print(f"{number} layers: {'fit' if plan.state == 'fits' else 'do not fit'}", flush=True)
    train_layers("limit", {"model.num_layers": str(fits)}, min(steps, 2), tiny, deadline)


def drawn_on_device(model: Decoder) -> InitialValues:
    """First weights of the recipe's distribution, drawn where that is fast: a core draws 100 million per second. Other
    numbers than a run has, which are the same on every machine."""
    rules = dict(initial_rules(model))

    @torch.no_grad()
    def fill(tensors: Mapping[str, torch.Tensor], first_rows: Mapping[str, int] = ALL_WHOLE) -> None:
        for name, tensor in tensors.items():
            rule = rules[name]
            if callable(rule):
                rule(tensor)
            else:
                tensor.copy_(torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE).normal_(0.0, rule))

    return fill


def train_layers(name: str, settings: dict[str, str], steps: int, tiny: bool, deadline: Deadline) -> None:
    """Steps of the 42B recipe with other settings, as many as there is time for."""
    started = time.perf_counter()
    setup = setup_of("slice_42b_h200", settings, tiny, keep=bool(settings))
    parts = build(setup, fresh=True, values_of=drawn_on_device)
    assert isinstance(parts.model, Decoder)
    parameters = count_parameters(parts.model.config).total
    tokens = setup.recipe.train.global_batch_size * setup.recipe.data.seq_len
    results: dict[str, Any] = {
        "parameters": parameters,
        "layers": parts.model.config.num_layers,
        "tokens_per_step": tokens,
        "floor": floor(parameters, tokens),
        "planned": {name: setup.plan.to_json()[name] for name in ("peak_bytes", "step_s", "fits")},
        "until_first_step_s": time.perf_counter() - started,
        "losses": [],
        "step_s": [],
    }
    for step in range(steps):
        if step and deadline.left() < max(results["step_s"][-1:]):
            break
        done = parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
        results["losses"].append(done.loss)
        results["step_s"].append(done.seconds)
        seconds = statistics.median(results["step_s"][1:] or results["step_s"])
        results |= {
            "tokens_per_s": tokens / seconds,
            "device_peak_bytes": device_peak_bytes(),
            "host_peak_bytes": host_peak_bytes(),
            "owners": parts.memory_tracker.snapshot(parts.model, parts.optimizer),
        }
        write_result(name, CLAIMS[name], results)
        print(f"step {step + 1}: loss {done.loss:.4f}, {done.seconds:.2f} s", flush=True)


# ---- 8 billion beside others ----


def offload_part(steps: int, tiny: bool, device_gib: float, deadline: Deadline) -> None:
    """Each contender in a process of its own, so that its peaks are its own."""
    results: dict[str, Any] = {"shape": TINY if tiny else EIGHT_B, "rates": RATES, "device_gib": device_gib}
    for index, name in enumerate(CONTENDERS):
        if deadline.passed(name, results):
            break
        more = ["--worker", name, "--steps", str(steps), "--device-gib", str(device_gib), *["--tiny"] * tiny]
        results[name] = call_worker(
            "card.memory_gpu", "offload", *more, timeout_s=deadline.share(len(CONTENDERS) - index)
        )
        print(f"{name}: {json.dumps(results[name])[:300]}", flush=True)
        write_result("offload", CLAIMS["offload"], results)


def cap_device(gib: float) -> dict[str, str]:
    """Let this process have no more of the device, where there is one; what a recipe has to say to plan for that."""
    if not gib:
        return {}
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    return {"plan.device_memory": str(int(gib * 2**30))}


def contend(name: str, steps: int, tiny: bool, device_gib: float) -> dict[str, Any]:
    """A contender's steps: the first two warm up, one where there are three or fewer."""
    if name == "torchao_offload" and DEVICE == "cpu":
        return {"not_run": "torchao's CPUOffloadOptimizer needs a GPU"}
    settings = cap_device(device_gib)
    try:
        if name == "layer_major":
            step, batches, parameters = layer_major(tiny, settings)
        else:
            step, batches, parameters = {"fsdp2_offload": fsdp2_offload, "torchao_offload": torchao_offload}[name](tiny)
    except ImportError as error:
        return {"not_run": f"{error.name} cannot be imported"}
    losses, seconds, tokens = [], [], 0
    for _ in range(steps):
        batch = next(batches)
        tokens = count_tokens(batch)
        started = time.perf_counter()
        losses.append(step(batch))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    timed = seconds[2 if steps > 3 else 1 :] or seconds
    return {
        "parameters": parameters,
        "losses": losses,
        "step_s": spread(timed),
        "tokens_per_s": tokens / statistics.median(timed),
        "device_peak_bytes": device_peak_bytes(),
        "host_peak_bytes": host_peak_bytes(),
    }


Contender = tuple[Callable[[list[Batch]], float], Iterator[list[Batch]], int]
"""A step that returns the loss, the micro-batches of each step, and the number of parameters."""


def layer_major(tiny: bool, settings: dict[str, str]) -> Contender:
    """Ours, planned for what it may have of the device."""
    parts = build(setup_of("cpu_10m", EIGHT_B | SLICED | settings, tiny), fresh=True)

    def step(batch: list[Batch]) -> float:
        result: StepResult = parts.executor.step(batch, 1e-4)
        return result.loss

    return step, iter(parts.stream.next_step, None), sum(p.numel() for p in parts.model.parameters())


def baseline(tiny: bool) -> tuple[Decoder, Iterator[list[Batch]]]:
    """The same decoder in BF16, compiled, layers recomputed, for other tools to train."""
    settings = EIGHT_B | {"precision.mode": "bf16_mixed", "train.activation_checkpoint": "full"}
    setup = setup_of("cpu_10m", settings | {"optim.moments": "bf16", "optim.master_weights": "stochastic"}, tiny)
    parts = build(setup, fresh=True)
    assert isinstance(parts.model, Decoder)
    model = parts.model.bfloat16()  # norms too: FSDP2 wants one dtype
    for param in model.parameters():
        param.grad_dtype = torch.bfloat16  # our executor had asked for FP32
    return model, iter(parts.stream.next_step, None)


def accumulate(model: Decoder, batch: list[Batch], backward: Callable[[torch.Tensor], None]) -> float:
    """Forward and backward over the micro-batches of a step; the mean loss."""
    targets, total = count_targets(batch), 0.0
    for micro in batch:
        out = model.loss({key: value.to(DEVICE) for key, value in micro.items()})
        backward(out.loss_sum / targets)
        total += float(out.loss_sum.detach())
    return total / targets


def fsdp2_offload(tiny: bool) -> Contender:
    """PyTorch's FSDP2 on one rank, parameters, gradients and states in host memory, fused AdamW there."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    model, batches = baseline(tiny)
    parameters = sum(p.numel() for p in model.parameters())
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1)
    mesh = dist.init_device_mesh(DEVICE, (1,))
    policy = CPUOffloadPolicy() if DEVICE == "cuda" else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    dist.fsdp.register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: list[Batch]) -> float:
        loss = accumulate(model, batch, lambda value: value.backward())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, parameters


def torchao_offload(tiny: bool) -> Contender:
    """torchao's optimizer on the host; parameters and gradients stay on the device, as accumulation needs them."""
    from torchao.optim import CPUOffloadOptimizer

    model, batches = baseline(tiny)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(batch: list[Batch]) -> float:
        loss = accumulate(model, batch, lambda value: value.backward())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, sum(p.numel() for p in model.parameters())


def main() -> None:
    """Run one part."""
    parser = parser_of(__doc__, tiny=True, seconds=True, steps=20, device_gib=0.0)
    parser.add_argument("part", choices=tuple(CLAIMS))
    parser.add_argument("--worker", choices=CONTENDERS, help="for a process of its own")
    args = arguments_for_card(parser)
    steps = min(args.steps, 4) if args.tiny else args.steps
    torch.manual_seed(0)
    deadline = Deadline(args.seconds)
    if args.worker:
        print(json.dumps(contend(args.worker, steps, args.tiny, args.device_gib)))
    elif args.part == "offload":
        offload_part(steps, args.tiny, args.device_gib, deadline)
    else:
        {"largest": largest_part, "limit": limit_part}[args.part](steps, args.tiny, deadline)


if __name__ == "__main__":
    main()
