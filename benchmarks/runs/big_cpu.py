"""A model whose classic training state is far over this machine's memory, all parameters trained: layer-major on a CPU.

Recipe slice_3b_cpu: BF16 weights in memory, 8-bit moments on disk, real text. Classic state is 16 bytes per parameter
(FP32 weights, gradients and two moments). `bound` says what the step waited for: the processor, or the disk. A batch
of so few tokens is one or two documents, so its loss says little: held-out rows of two domains are evaluated before
and after. Results are written after every step.

python -m benchmarks.runs.big_cpu [--steps 6] [--rows 4] [--seq 128] [--7b] [--tiny]
"""

import argparse
import resource
import time
from typing import Any

from benchmarks.common import spread, write_result
from tilewright.core.config.load import load_recipe
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_parameters
from tilewright.training.assemble import Components, build, set_up
from tilewright.training.executor.evaluate import evaluate, pooled

CLAIM = (
    "3 billion parameters or more, classic state over 24 GiB, train full-parameter on this machine, the loss falling"
)
SEVEN_B = {"model.dim": "4096", "model.ffn_dim": "11008", "model.num_layers": "34", "memory.offload_params": "disk"} | {
    "model.num_heads": "32"
}
TINY = {
    "model.dim": "64", "model.num_layers": "3", "model.num_heads": "4", "model.num_kv_heads": "2",
    "model.ffn_dim": "128", "data.vocab_size": "512", "data.max_bytes": "2MB", "train.compile": "off",
}  # fmt: skip
CLASSIC_BYTES = 16


def traffic(parts: Components) -> tuple[int, int, float]:
    """Bytes read from and written to the disk tier so far, and seconds that the computation stood still for it."""
    home = parts.executor.run.offloader
    told = [pool.traffic for pool in (home.parameters, home.states)]
    return (
        sum(one.read_bytes for one in told),
        sum(one.written_bytes for one in told),
        sum(one.wait_s for one in told),
    )


def held_out(parts: Components) -> float:
    """Loss on the same rows of two domains."""
    some = {domain: parts.held_out.batches[domain] for domain in sorted(parts.held_out.batches)[:2]}
    with parts.executor.access.forward_passes(parts.model):
        found = pooled(evaluate(parts.model, some, fp32=False))
    assert found is not None
    return found.loss


def main() -> None:
    """Train, and write after each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--7b", dest="seven", action="store_true", help="the 7B shape, weights on disk too")
    parser.add_argument("--tiny", action="store_true", help="a small size; its numbers mean nothing")
    args = parser.parse_args()
    settings = {"data.seq_len": str(args.seq), "train.global_batch_size": str(args.rows), "run.device": "cpu"}
    settings |= {"train.micro_batch_size": str(max(1, args.rows // 2)), "plan.enforce": "false", "run.name": "big_cpu"}
    name = "big_cpu_tiny" if args.tiny else "big_cpu_7b" if args.seven else "big_cpu_3b"
    settings |= (SEVEN_B if args.seven else {}) | (TINY if args.tiny else {})
    started = time.perf_counter()
    setup = set_up(load_recipe("slice_3b_cpu", settings, environ={}))
    parts = build(setup, fresh=True)
    assert isinstance(parts.model, Decoder)
    number = count_parameters(parts.model.config).total
    tokens = args.rows * args.seq
    results: dict[str, Any] = {
        "parameters": number,
        "classic_state_bytes": CLASSIC_BYTES * number,
        "machine_memory_bytes": setup.machine.host_memory_bytes,
        "tokens_per_step": tokens,
        "until_first_step_s": time.perf_counter() - started,
        "planned_peak_bytes": setup.plan.to_json()["peak_bytes"],
        "losses": [],
    }
    results["held_out_before"] = held_out(parts)
    print(f"held-out loss {results['held_out_before']:.4f}", flush=True)
    times, waits, busy = [], [], []
    for step in range(args.steps):
        before, cpu = traffic(parts), time.process_time()
        done = parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
        after = traffic(parts)
        times.append(done.seconds)
        waits.append((after[2] - before[2]) / done.seconds)
        busy.append((time.process_time() - cpu) / done.seconds)
        results["losses"].append(done.loss)
        results |= {
            "step_s": spread(times),
            "tokens_per_s": tokens / spread(times)["median"],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "disk_read_bytes_a_step": after[0] - before[0],
            "disk_written_bytes_a_step": after[1] - before[1],
            "share_waiting_for_disk": spread(waits),
            "cores_busy": spread(busy),
        }
        results["bound"] = "disk" if results["share_waiting_for_disk"]["median"] > 0.5 else "processor"
        write_result(name, CLAIM, results)
        print(f"step {step + 1}: loss {done.loss:.4f}, {done.seconds:.1f} s, {waits[-1]:.0%} for the disk", flush=True)
    results["held_out_after"] = held_out(parts)
    print(f"held-out loss {results['held_out_after']:.4f}", flush=True)
    write_result(name, CLAIM, results)
    parts.close()


if __name__ == "__main__":
    main()
