"""What fitting the layers behind a cut gives back before anything is trained: a small byte-level decoder, trained by a
plain loop on Python's library, its FFN channels and heads cut by a quarter and by half.

Rises are of the loss on held-out text in FP32, relative, on the same rows. Calibration is training text. Each seed has
its own file in the folder, so the same command continues; `--seed` runs one of them.

python -m benchmarks.compress.prune_refit --work FOLDER [--seeds 3] [--seed N]
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from tilewright.compress.budget.measure import parameters
from tilewright.compress.prune.prune import prune
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder

CLAIM = "a fit of the layers behind a cut gives back most of what FFN channels and part of what heads cost"
KINDS, SHARES, METHODS = ("ffn", "heads"), (0.25, 0.5), ("l1", "activation", "random")
STEPS, LR, ROWS, LENGTH, CALIBRATION, HELD_OUT = 400, 2e-3, 8, 128, 8, 24
SHAPE = {"vocab_size": 256, "dim": 96, "num_heads": 6, "num_kv_heads": 6, "num_layers": 4, "ffn_dim": 384}
_FILES, _BYTES = 120, 3_000_000


def library() -> tuple[Tensor, Tensor]:
    """Bytes to train on and to hold out, of the first files of Python's library by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
    ids = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:_BYTES]))
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:]


def drawn(ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows from anywhere in some text."""
    starts = torch.randint(len(ids) - LENGTH - 1, (ROWS,), generator=generator).tolist()
    rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
    return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def trained(seed: int, text: Tensor, generator: torch.Generator) -> Decoder:
    """A decoder after some steps of AdamW."""
    model = Decoder(DecoderConfig.of(**SHAPE))
    init_weights(model, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 30) * (1 - step / STEPS)
        out = model.loss(drawn(text, generator))
        (out.loss_sum / out.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def loss_of(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean over targets."""
    found = [model.loss(batch) for batch in batches]
    return sum(float(out.loss_sum) for out in found) / sum(int(out.count) for out in found)


def of_seed(seed: int) -> dict[str, Any]:
    """Rises without a fit and with it."""
    generator = torch.Generator().manual_seed(seed)
    text, rest = library()
    model = trained(seed, text, generator)
    held_out = [drawn(rest, generator) for _ in range(HELD_OUT)]
    seen = [drawn(text, generator) for _ in range(CALIBRATION)]
    whole = loss_of(model, held_out)
    found: dict[str, Any] = {"loss": whole, "parameters": parameters(model)}
    for kind in KINDS:
        for share in SHARES:
            for method in METHODS:
                rises = [
                    loss_of(
                        prune(model, {kind: share}, importance=method, batches=seen, seed=seed, refit=refit).model,
                        held_out,
                    )
                    / whole
                    - 1
                    for refit in (False, True)
                ]
                found[f"{kind} -{100 * share:g} %, {method}"] = {"cut": rises[0], "fitted": rises[1]}
                print(seed, kind, share, method, rises, flush=True)
    return found


def main() -> None:
    """Measure what is missing; write the result where all seeds are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = [args.work / f"refit-{seed}.json" for seed in range(args.seeds)]
    for seed, path in enumerate(paths):
        if not path.is_file() and args.seed in (None, seed):
            path.write_text(json.dumps(of_seed(seed), indent=1) + "\n")
    if all(path.is_file() for path in paths):
        seeds = {str(seed): json.loads(path.read_text()) for seed, path in enumerate(paths)}
        facts = {"steps": STEPS, "rows": ROWS, "length": LENGTH, "calibration": CALIBRATION, "held_out": HELD_OUT}
        write_result("prune_refit", CLAIM, facts | {"shape": SHAPE, "seeds": seeds})


if __name__ == "__main__":
    main()
