"""How fast cached tokens read weights, beside a sum over the same bytes, in processor time with one thread.

First the layers alone: `F.linear` and `row_linear` (`ops.linear`) of 1 to 8 rows, of the default recipe's widths
and 4,096 wide. Then whole tokens that are drawn with a cache, by a decoder of 150 million parameters, with plain layers
and with those that `generate`, `chat` and `serve` have. All of a line take turns in one process.

python -m benchmarks.serving.row_linear [--turns 7] [--tokens 16] [--tiny]
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import Stolen, machine_kind, parser_of, spread, write_result
from benchmarks.turns import in_turns, ratio
from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.generate import generate
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.linear import MOST_ROWS, ROW_LINEAR
from tilewright.precision.mixed import rows

CLAIM = "cached tokens read weights at least at half of the memory's speed"
SHAPES = ((704, 256, 24), (4096, 4096, 6))
"""Out features, in features and number of weights: the default recipe's FFN, and a wide model's."""
DTYPES = (torch.float32, torch.bfloat16)
PROMPT = 8


def total(weights: list[Tensor]) -> list[Tensor]:
    """A sum over the bytes of weights: what reads them and does little else."""
    return [weight.view(torch.int32).view(torch.float32).sum() for weight in weights]


def layers(shape: tuple[int, int, int], dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Bytes per second of each way, and the median share of the sum's."""
    outs, width, count = shape
    weights = [torch.randn(outs, width).to(dtype) for _ in range(count)]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    run = choose(ROW_LINEAR, detect_machine("cpu"), Case("cpu", dtype)).candidate.run
    ways: dict[str, Callable[[], object]] = {"sum": lambda: total(weights)}
    for number in range(1, MOST_ROWS + 1):
        x = torch.randn(number, width).to(dtype)
        ways[f"torch_{number}"] = lambda x=x: [F.linear(x, weight) for weight in weights]
        ways[f"rows_{number}"] = lambda x=x: [run(x, weight, None) for weight in weights]
    taken = in_turns(ways, turns, warm_ups=1, clock=time.process_time)
    return {"bytes": size} | {
        f"{name}_gb_per_s": spread([size / seconds / 1e9 for seconds in each]) for name, each in taken.items()
    } | {
        f"{name}_share_of_sum": ratio(taken["sum"], taken[name])
        for name in ways
        if name != "sum"
    }  # fmt: skip


def tokens(dtype: torch.dtype, turns: int, count: int, tiny: bool) -> dict[str, Any]:
    """The same of whole tokens, drawn greedily, and whether both kinds of layer draw the same."""
    sizes = {"dim": 64, "num_heads": 4, "num_layers": 2} if tiny else {"dim": 1024, "num_heads": 16, "num_layers": 10}
    plain = Decoder(DecoderConfig.of(vocab_size=8192, **sizes)).eval()
    init_weights(plain, seed=0)
    plain = plain.to(dtype)
    fast = copy.deepcopy(plain)
    rows.attach(fast, detect_machine("cpu"))
    ids = torch.arange(PROMPT)[None]
    read = [param.detach() for name, param in plain.named_parameters() if "embed" not in name and param.ndim == 2]
    size = sum(param.numel() * param.element_size() for param in read)
    drawn: dict[str, Tensor] = {}

    def draw(name: str, model: Decoder) -> None:
        cache = model.new_cache(1, PROMPT + count)
        with torch.no_grad():
            row = model.next_token_logits(ids, cache).argmax(-1, keepdim=True)
            began, found = time.process_time(), [row]
            for _ in range(count - 1):
                found.append(model.next_token_logits(found[-1], cache).argmax(-1, keepdim=True))
        seconds[name].append((time.process_time() - began) / (count - 1))
        drawn[name] = torch.cat(found, dim=1)

    seconds: dict[str, list[float]] = {"torch": [], "rows": []}
    sums = in_turns(
        {"sum": lambda: total(read), "torch": lambda: draw("torch", plain), "rows": lambda: draw("rows", fast)},
        turns,
        warm_ups=1,
        clock=time.process_time,
    )["sum"]
    taken = {name: each[1:] for name, each in seconds.items()} | {"sum": sums}
    whole = generate(fast, ids, count, temperature=0)
    assert torch.equal(whole[:, PROMPT:], drawn["rows"]), "drawn by hand as by `generate`"
    found: dict[str, Any] = {"parameters": sum(param.numel() for param in plain.parameters()), "bytes_per_token": size}
    found["same_tokens"] = torch.equal(drawn["torch"], drawn["rows"])
    for name, each in taken.items():
        found[f"{name}_s"] = spread(each)
    for name in ("torch", "rows"):
        found[f"{name}_share_of_sum"] = ratio(sums, taken[name])
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16, help="of each turn of the whole model")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"turns": asked.turns}
    with Stolen() as stolen:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            for shape in ((24, 16, 4),) if asked.tiny else SHAPES:
                found = results[f"{name} {shape[0]}x{shape[1]}"] = layers(shape, dtype, asked.turns)
                rates = {key.removesuffix("_gb_per_s"): one["median"] for key, one in found.items() if "_gb_" in key}
                print(f"{name} {shape}, GB/s: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()))
            found = results[f"{name} token"] = tokens(dtype, asked.turns, asked.tokens, asked.tiny)
            shares = {way: found[f"{way}_share_of_sum"]["median"] for way in ("torch", "rows")}
            print(f"{name}, whole tokens, share of the sum's speed: {shares}, same tokens: {found['same_tokens']}")
    results["stolen_share"] = stolen.share
    results["worst_share_of_sum"] = min(
        statistics.median(
            found["rows_1_share_of_sum" if "rows_1_share_of_sum" in found else "rows_share_of_sum"]["samples"]
        )
        for found in results.values()
        if isinstance(found, dict)
    )
    write_result(f"row_linear_{'tiny' if asked.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
