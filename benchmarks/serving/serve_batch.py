"""Tokens of `tilewright serve` with one client against eight: how much of a pass eight answers share.

A model whose decoding is bound by its weights (150 million parameters in FP32, 0.6 GB, far more than the caches) draws
answers through `serving.answer_batch.Batch`, as the server's worker does: one at a time, and eight side by side. Runs
of both kinds alternate in one process. Counted are tokens per second of the clock and of the processor. A third kind is
one answer with a seed, whose passes have the width of eight.

    python -m benchmarks.serving.serve_batch
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.common import machine_kind, parser_of, spread, write_result
from tilewright.data.common.tokenizer import train_tokenizer
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.sampling import Sampling
from tilewright.serving.answer_batch import Batch
from tilewright.serving.next_token import AnswerSettings
from tilewright.serving.session import Session

CLIENTS, TOKENS, PROMPT, ROUNDS = 8, 16, 32, 7
CHUNK = 128


def main() -> None:
    parser_of(__doc__).parse_args()
    tokenizer = train_tokenizer(["hello you, how are you today? " * 50], 300)
    config = DecoderConfig.of(vocab_size=8192, dim=1024, num_heads=16, num_kv_heads=8, num_layers=12, ffn_dim=2816)
    model = Decoder(config).eval()
    init_weights(model, 0)
    session = Session(model, tokenizer, None, torch.device("cpu"), 4096)
    kinds = {"one": (1, False), "eight": (CLIENTS, False), "one_seeded": (1, True)}
    rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for kind in kinds:  # warm
        _rate(session, *kinds[kind], tokens=4)
    for _ in range(ROUNDS):
        for kind, (clients, seeded) in kinds.items():
            rates[kind].append(_rate(session, clients, seeded, TOKENS))
    found: dict[str, Any] = {
        kind: {
            "tokens_per_s": statistics.median(wall for wall, _ in runs),
            "tokens_per_processor_s": statistics.median(processor for _, processor in runs),
        }
        for kind, runs in rates.items()
    }
    for unit in ("tokens_per_s", "tokens_per_processor_s"):
        which = 0 if unit == "tokens_per_s" else 1
        for kind in ("eight", "one_seeded"):
            ratios = [other[which] / one[which] for other, one in zip(rates[kind], rates["one"], strict=True)]
            found[f"{kind}_{unit}_of_one"] = spread(ratios)
    found |= {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
    found |= {"tokens": TOKENS, "prompt": PROMPT, "rounds": ROUNDS, "chunk": CHUNK}
    write_result(
        f"serve_batch_{machine_kind()}", "8 clients of the server get at least 3 times the tokens of one", found
    )
    print(found)


def _rate(session: Session, clients: int, seeded: bool, tokens: int) -> tuple[float, float]:
    """Tokens per second of the clock and of the processor, prompts left out."""
    batch = Batch(session.model, session.device, width=CLIENTS, chunk=CHUNK, budget_bytes=2**32)
    answers = []
    for i in range(clients):
        settings = AnswerSettings(tokens + 1, Sampling(), seed=i if seeded else None)
        answers.append(session.answer([2 + i] * PROMPT, settings, turn=False))
        assert batch.begin(answers[-1])
    while any(not answer.num_tokens for answer in answers):
        batch.step(answers)
    begun = [answer.num_tokens for answer in answers]
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(tokens - max(begun)):
        batch.step(answers)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    drawn = sum(answer.num_tokens for answer in answers) - sum(begun)
    return drawn / wall, drawn / processor


if __name__ == "__main__":
    main()
