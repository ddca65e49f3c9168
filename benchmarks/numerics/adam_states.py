"""AdamW by format of its states: time and bytes of an update, and how far updates are from those of FP32 states.

speed   one update of 2^24 parameters, ours beside torch's fused FP32 AdamW (and torchao's 8-bit one where it is
        installed), on one thread and on all that this process may use; and the first step of a fresh process.
error   open loop: a small decoder is trained on the words of this repository by FP32 AdamW, and its gradients are also
        given to states in other formats. What is compared is the update, the step divided by the learning rate.

python -m benchmarks.numerics.adam_states [speed error]
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine_kind, spread, write_result
from tilewright.core.hardware import detect_machine, find_cxx_compiler
from tilewright.formats import quadratic_map
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.backends.cpu import build
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam

CLAIM = "8-bit AdamW with stochastic rounding: at most 10 ns a parameter on a CPU, first step in 5 s"
COUNT = 2**24
WARM_UPS, ROUNDS = 1, 7
OURS = {
    "fp32 states": (torch.float32, {}),
    "bf16 moments, stochastic bf16 weights": (torch.bfloat16, {"moments": "bf16", "master": "stochastic"}),
    "8bit moments, fp32 weights": (torch.float32, {"moments": "8bit"}),
    "8bit moments, 24-bit weights": (torch.bfloat16, {"moments": "8bit", "master": "split24"}),
    "8bit moments, stochastic bf16 weights": (torch.bfloat16, {"moments": "8bit", "master": "stochastic"}),
}


# ---- speed ----


def steppers() -> Iterator[tuple[str, Callable[[], Callable[[], None]], float]]:
    """Name, what makes an optimizer and returns its step, and bytes a parameter of weight and states."""
    for name, (dtype, options) in OURS.items():

        def make(dtype: torch.dtype = dtype, options: dict[str, str] = options) -> Callable[[], None]:
            param = nn.Parameter(torch.randn(COUNT).to(dtype))
            optimizer, grad = DeepSeekAdam([param], **options), torch.randn(COUNT)
            return lambda: optimizer.step_params([param], [grad])

        layout = DeepSeekAdam([nn.Parameter(torch.empty(1))], **options).state_layout(torch.empty(COUNT, dtype=dtype))
        state = sum(shape.numel() * kind.itemsize for shape, kind in layout.values())
        yield f"tilewright {name}", make, dtype.itemsize + state / COUNT

    def fused() -> Callable[[], None]:
        param = nn.Parameter(torch.randn(COUNT))
        param.grad = torch.randn(COUNT)
        return torch.optim.AdamW([param], fused=True).step

    yield "torch fused, fp32 states", fused, 12.0
    if find_spec("torchao"):

        def torchao() -> Callable[[], None]:
            from torchao.optim import AdamW8bit

            param = nn.Parameter(torch.randn(COUNT).bfloat16())
            param.grad = torch.randn(COUNT).bfloat16()
            return AdamW8bit([param], bf16_stochastic_round=True).step

        yield "torchao 8bit, stochastic bf16 weights", torchao, 4 + 8 / 256


def speed() -> dict[str, object]:
    """Nanoseconds a parameter, one round of all after the other so that other programs disturb all alike; wall time,
    and processor time over the threads, which waits for other programs are not in."""
    results: dict[str, object] = {"parameters": COUNT, "unit": "ns a parameter"}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        steps = {name: make() for name, make, _ in steppers()}
        wall: dict[str, list[float]] = {name: [] for name in steps}
        processor: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARM_UPS + ROUNDS):
            for name, step in steps.items():
                start, start_processor = time.perf_counter(), time.process_time()
                step()
                wall[name].append((time.perf_counter() - start) / COUNT * 1e9)
                processor[name].append((time.process_time() - start_processor) / COUNT / threads * 1e9)
        results[f"{threads} threads"] = {
            name: {"wall": spread(wall[name][WARM_UPS:]), "processor": spread(processor[name][WARM_UPS:])}
            for name in steps
        }
    results["bytes per parameter, weight and states"] = {name: round(size, 4) for name, _, size in steppers()}
    results["first step"] = first_step()
    return results


def first_step() -> dict[str, float]:
    """Wall seconds, the least of three, to build the C++ kernel into an empty cache."""
    compiler = find_cxx_compiler()
    if compiler is None:
        return {}
    times = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            build.build(build.LOW_BIT_ADAM, compiler, Path(folder))
            times.append(time.perf_counter() - start)
    return {"build_s": min(times)}


# ---- error ----

VOCAB, LENGTH, ROWS = 4096, 128, 8
BETA1, EPS = 0.9, 1e-8
TAIL = 20
"""Steps at the end over which errors are summed."""


def equal_steps(x_N: Tensor, *, signed: bool) -> Tensor:
    """Values after storage in 8-bit codes with equal steps, stochastically rounded: what square codes replace."""
    x_BK = x_N.view(-1, quadratic_map.BLOCK)
    steps = 127 if signed else 255
    unit_B1 = (x_BK.abs().amax(1, keepdim=True) / steps).clamp_min(1e-38)
    return ((x_BK / unit_B1 + torch.rand(x_BK.shape)).floor().clamp(-steps, steps) * unit_B1).view(-1)


def square_steps(x_N: Tensor, *, signed: bool) -> Tensor:
    """The same in square codes."""
    noise = torch.randint(0, 256, x_N.shape, dtype=torch.int32)
    return quadratic_map.decode(*quadratic_map.encode(x_N, noise, signed=signed))


STORED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "fp32": lambda m, v: (m, v),
    "bf16": lambda m, v: (m.bfloat16().float(), v.bfloat16().float()),
    "equal steps of m and v": lambda m, v: (equal_steps(m, signed=True), equal_steps(v, signed=False)),
    "equal steps of m and root of v": lambda m, v: (
        equal_steps(m, signed=True),
        equal_steps(v.sqrt(), signed=False).square(),
    ),
    "square codes of m and root of v": lambda m, v: (
        square_steps(m, signed=True),
        square_steps(v.sqrt(), signed=False).square(),
    ),
}


def error(beta2: float, steps: int) -> dict[str, object]:
    """Size of the difference of updates over the size of FP32 updates, and the largest single update, by format."""
    torch.manual_seed(0)
    config = DecoderConfig.of(vocab_size=VOCAB, dim=128, num_layers=3, num_heads=4)
    model, batches = Decoder(config, Kernels(detect_machine("cpu"), compile=False)), word_batches()
    init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(BETA1, beta2), weight_decay=0.1)
    watched = {name: p for name, p in model.named_parameters() if p.numel() % quadratic_map.BLOCK == 0}
    states = {stored: {name: (torch.zeros(p.numel()),) * 2 for name, p in watched.items()} for stored in STORED}
    sums = {stored: {"error": 0.0, "size": 0.0, "largest": 0.0} for stored in STORED}
    for step in range(1, steps + 1):
        ids = next(batches)
        out = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        loss = out.loss_sum / out.count
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, param in watched.items():
            exact = None
            for stored, store in STORED.items():
                m, v = states[stored][name]
                grad = param.grad.flatten()
                m, v = m + (1 - BETA1) * (grad - m), beta2 * v + (1 - beta2) * grad * grad
                states[stored][name] = store(m, v)
                if step > steps - TAIL:
                    update = m / (1 - BETA1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)
                    exact = update if exact is None else exact
                    found = sums[stored]
                    found["error"] += float((update - exact).square().sum())
                    found["size"] += float(update.square().sum())
                    found["largest"] = max(found["largest"], float(update.abs().max()))
        optimizer.step()
    size = sums["fp32"]["size"]
    return {
        "loss_at_the_end": loss.item(),
        **{
            stored: {
                "relative_error": (found["error"] / size) ** 0.5,
                "relative_size": (found["size"] / size) ** 0.5,
                "largest_update": found["largest"],
            }
            for stored, found in sums.items()
        },
    }


def word_batches() -> Iterator[Tensor]:
    """Rows of word numbers [ROWS, LENGTH + 1] from random places of this repository's texts."""
    root = Path(__file__).parents[2]
    files = sorted([*root.glob("src/**/*.py"), *root.glob("docs/**/*.md")])
    words = [word for file in files for word in re.findall(r"\w+|\S", file.read_text(encoding="utf-8"))]
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(VOCAB - 1), 1)}
    ids = torch.tensor([numbers.get(word, 0) for word in words])
    while True:
        yield torch.stack([ids[at : at + LENGTH + 1] for at in torch.randint(0, len(ids) - LENGTH, (ROWS,)).tolist()])


def main() -> None:
    """Run the parts asked for and write them into the result beside those of earlier calls."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["speed", "error"])
    parts = parser.parse_args().parts
    name = f"adam_states_{machine_kind()}"
    path = RESULTS / f"{name}.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    if "speed" in parts:
        results["speed"] = speed()
    if "error" in parts:
        results["error"] = {f"beta2 {beta2}": error(beta2, steps) for beta2, steps in ((0.95, 60), (0.999, 200))}
    write_result(name, CLAIM, results)
    print(json.dumps({part: results[part] for part in parts}, indent=1))


if __name__ == "__main__":
    main()
