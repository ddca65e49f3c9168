"""Seconds of a continuation with the key/value cache and without, of the default recipe's model in FP32.

That is what `tilewright generate`, `chat` and `serve` run. The weights are the initial ones: time does not depend on
them. Both ways take turns, and must write the same tokens. With `--transformers` its `generate`
writes them too, with its own cache, from a folder of the same weights.

python -m benchmarks.serving.generate [--tokens 512] [--turns 3] [--threads 1] [--device auto] [--transformers]
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Deadline, Stolen, machine_kind, parser_of, spread, write_result
from benchmarks.turns import ratio
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.models.build import build_model, init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.generate import generate
from tilewright.precision.mixed import few_row_layers

CLAIM = "cached generation at least 10x uncached at 512 tokens on the default recipe's model, same tokens"
PROMPT = 24


def timed(
    model: torch.nn.Module, prompt: torch.Tensor, tokens: int, use_cache: bool
) -> tuple[float, float, torch.Tensor]:
    """Seconds, seconds of the processor, and the row."""
    began, cpu_s = time.perf_counter(), time.process_time()
    row = generate(model, prompt, tokens, temperature=0, use_cache=use_cache).cpu()  # waits for the device
    return time.perf_counter() - began, time.process_time() - cpu_s, row


def peer_of(model: Decoder, device: str) -> Callable[[torch.Tensor, int], tuple[float, torch.Tensor]]:
    """transformers with the same weights: seconds, and the row."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_hf(folder, extra={"max_position_embeddings": 4096})
        net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    def run(prompt: torch.Tensor, tokens: int) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        row = net.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None,
        ).cpu()  # fmt: skip
        return time.perf_counter() - began, row

    return run


def main() -> None:
    parser = parser_of(__doc__, seconds=True, tokens=512, turns=3, threads=1)
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="auto: a GPU if there is one")
    parser.add_argument("--transformers", action="store_true", help="and transformers' own loop")
    asked = parser.parse_args()
    deadline = Deadline(asked.seconds)
    device = detect_machine().device if asked.device == "auto" else asked.device
    torch.set_num_threads(asked.threads)
    recipe = load_recipe("default", environ={}).recipe
    model = build_model(recipe.model, recipe.data.vocab_size, device=device).eval()
    assert isinstance(model, Decoder)
    init_weights(model, 0)
    few_row_layers.attach(model, detect_machine(device))
    prompt = torch.randint(0, recipe.data.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(device)
    peer = peer_of(model, device) if asked.transformers else None
    theirs: list[float] = []
    as_theirs = 0
    if peer is not None:
        peer(prompt, 8)
    timed(model, prompt, 8, True), timed(model, prompt, 8, False)  # allocations and oneDNN's preparations
    cached, whole, same = [], [], True
    processor: list[float] = []
    with Stolen() as stolen:
        for turn in range(asked.turns):
            if turn and not deadline.left():
                break
            fast, fast_cpu, row = timed(model, prompt, asked.tokens, True)
            slow, slow_cpu, wanted = timed(model, prompt, asked.tokens, False)
            cached.append(fast)
            whole.append(slow)
            processor.append(slow_cpu / fast_cpu)
            same &= torch.equal(row, wanted)
            if peer is not None:
                taken, their_row = peer(prompt, asked.tokens)
                theirs.append(taken)
                as_theirs = int((row == their_row).cumprod(1).sum()) - PROMPT
            print(
                f"cached {fast:.2f} s ({fast_cpu:.2f} of the processor), uncached {slow:.2f} s ({slow_cpu:.2f}), "
                f"same tokens: {torch.equal(row, wanted)}",
                flush=True,
            )
    results = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "prompt_tokens": PROMPT,
        "new_tokens": asked.tokens,
        "device": device,
        "threads": asked.threads,
        "same_tokens": same,
        "different_tokens_in_the_row": len(row.unique()),
        "cached_s": spread(cached),
        "uncached_s": spread(whole),
        "speedup": ratio(whole, cached),
        "speedup_processor_time": spread(processor),
        "stolen_share": stolen.share,
    }
    if theirs:
        results["transformers_s"] = spread(theirs)
        results["over_transformers"] = ratio(theirs, cached)
        results["first_tokens_as_transformers"] = as_theirs
        print(f"over transformers {results['over_transformers']['median']:.2f}x, the first {as_theirs} tokens the same")
    write_result(f"generate_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
