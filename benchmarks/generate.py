"""Seconds of a continuation with the key/value cache and without, of the default recipe's model in FP32.

That is what `tilewright generate`, `chat` and `serve` run. The weights are the initial ones: time does not depend on
them. Both ways take turns, and must write the same tokens.

python -m benchmarks.generate [--tokens 512] [--turns 3] [--threads 1]
"""

import argparse
import time

import torch

from benchmarks.common import Stolen, machine_kind, spread, write_result
from tilewright.core.config.load import load_recipe
from tilewright.models.build import build_model, init_weights
from tilewright.models.generate import generate

CLAIM = "cached generation at least 10x uncached at 512 tokens on the default recipe's model, same tokens"
PROMPT = 24


def timed(
    model: torch.nn.Module, prompt: torch.Tensor, tokens: int, use_cache: bool
) -> tuple[float, float, torch.Tensor]:
    """Seconds, seconds of the processor, and the row."""
    began, cpu_s = time.perf_counter(), time.process_time()
    row = generate(model, prompt, tokens, temperature=0, use_cache=use_cache)
    return time.perf_counter() - began, time.process_time() - cpu_s, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    recipe = load_recipe("default", environ={}).recipe
    model = build_model(recipe.model, recipe.data.vocab_size, device="cpu").eval()
    init_weights(model, 0)
    prompt = torch.randint(0, recipe.data.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    timed(model, prompt, 8, True), timed(model, prompt, 8, False)  # allocations and oneDNN's preparations
    cached, whole, same = [], [], True
    processor: list[float] = []
    with Stolen() as stolen:
        for _ in range(asked.turns):
            fast, fast_cpu, row = timed(model, prompt, asked.tokens, True)
            slow, slow_cpu, wanted = timed(model, prompt, asked.tokens, False)
            cached.append(fast)
            whole.append(slow)
            processor.append(slow_cpu / fast_cpu)
            same &= torch.equal(row, wanted)
            print(
                f"cached {fast:.2f} s ({fast_cpu:.2f} of the processor), uncached {slow:.2f} s ({slow_cpu:.2f}), "
                f"same tokens: {torch.equal(row, wanted)}",
                flush=True,
            )
    results = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "prompt_tokens": PROMPT,
        "new_tokens": asked.tokens,
        "threads": asked.threads,
        "same_tokens": same,
        "different_tokens_in_the_row": len(row.unique()),
        "cached_s": spread(cached),
        "uncached_s": spread(whole),
        "speedup": spread([slow / fast for slow, fast in zip(whole, cached, strict=True)]),
        "speedup_processor_time": spread(processor),
        "stolen_share": stolen.share,
    }
    write_result(f"generate_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
