"""Memory and speed of fine-tuning a model of Qwen3-0.6B's shape, every parameter or adapters: ours and the peers'.

The folder is made here: the published shape (28 layers of 1024, vocabulary 151,936) with random BF16 weights, since
memory and time depend on shapes alone. All rows train on the same packed rows of tokens, as many per step. Each is a
process of its own, and its memory is the kernel's high-water mark of the whole process and of its children, libraries,
loading and the last save included.

full, full_disk     `tilewright train` layer by layer, BF16 weights rounded stochastically, 8-bit moments in memory or
                    on disk
lora_fp8            `tilewright train`, adapters of rank 16 on an FP8 base
trainer             Hugging Face's Trainer as its page on memory says: weights in BF16, gradient checkpointing,
                    torchao's 8-bit AdamW
start               `tilewright finetune` as a user types it, LoRA, on 200 conversations; only until its first step
in_backward         a loop with the same, whose optimizer runs inside of the backward pass, parameter by parameter, and
                    with the head's loss in chunks

python -m benchmarks.runs.finetune_memory [--rows full_disk trainer] [--rounds 2] [--tiny]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import Stolen, machine_kind, spread, write_result
from benchmarks.loops import hf_trainer, step_clock
from benchmarks.run_command import step_rows, train_command
from benchmarks.worker import RETURNS_FREED, command_of

CLAIM = (
    "a full-parameter fine-tune of a model of Qwen3-0.6B's shape takes at most 4 GiB for the whole process, adapters "
    "on FP8 at most 2 GiB; at least 30 % less than Hugging Face's Trainer at its best settings, in at most 1.2x its "
    "time"
)
SEQ, BATCH, STEPS, CHUNK = 512, 2, 5, 256
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
TINY |= {"num_key_value_heads": 1, "vocab_size": 5000}
LAYERWISE = {
    "memory.executor": "layer_major", "memory.plan": "", "optim.moments": "8bit",
    "optim.master_weights": "stochastic", "optim.clip": "delayed", "memory.rollback": "checkpoint",
    "memory.loss_chunk_bytes": "64MB", "train.micro_batch_size": str(BATCH),
}  # fmt: skip
OURS = {
    "full": LAYERWISE,
    "full_disk": LAYERWISE | {"memory.offload_optimizer": "disk"},
    "lora_fp8": {"lora.rank": "16", "precision.mode": "fp8_tile", "train.activation_checkpoint": "full",
                 "optim.master_weights": "stochastic",
                 "train.micro_batch_size": "1", "memory.plan": ""},
}  # fmt: skip
PEERS = ("trainer", "in_backward")
START = "start"


def make_folder(folder: Path, tiny: bool) -> None:
    """Model folder, tokenizer, and the text that is trained on."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tilewright.data.common.tokenizer import train_tokenizer

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(Qwen3Config(**(SHAPE | (TINY if tiny else {})))).save_pretrained(folder / "model")
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))[:60]]
    train_tokenizer(texts, 4096).save(folder / "model")
    talks = [
        [
            {"role": "user", "content": f"What is {number}? " * 20},
            {"role": "assistant", "content": f"It is {number}. " * 20},
        ]
        for number in range(200)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (folder / "text").mkdir()
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")


def settings_of(name: str, folder: Path) -> dict[str, str]:
    """Of one of our rows."""
    return {
        "run.dir": str(folder / "runs"), "run.name": f"{name}-{time.time_ns()}", "model.kind": "hf",
        "model.path": str(folder / "model"), "model.weights": "load", "data.source": str(folder / "text"),
        "data.cache_dir": str(folder / "cache"), "data.seq_len": str(SEQ), "train.global_batch_size": str(BATCH),
        "train.steps": str(STEPS), "train.eval_interval": "0", "train.eval_batches": "1", "train.sample_tokens": "0",
        "train.compile": "off", "optim.lr": "1e-5", "optim.kind": "adamw", "checkpoint.interval_minutes": "0",
        "checkpoint.save_last": "false", "log.report": "false",
        "precision.eval_fp32": "false",
    } | OURS[name]  # fmt: skip


def ours(name: str, folder: Path) -> dict[str, Any]:
    """One run through the command line."""
    settings = settings_of(name, folder)
    return outcome(train_command("default", settings), Path(settings["run.dir"]) / settings["run.name"])


def start(folder: Path) -> dict[str, Any]:
    """A fine-tune with the settings of its recipe, until its first step has ended."""
    name = f"start-{time.time_ns()}"
    command = [sys.executable, "-m", "tilewright", "finetune", str(folder / "model"), str(folder / "talks.jsonl")]
    command += [f"--run.dir={folder / 'runs'}", f"--run.name={name}", f"--data.cache_dir={folder / 'cache'}"]
    command += ["--data.chat_template=chatml", "--train.steps=1", "--checkpoint.save_last=false", "--log.report=false"]
    return outcome(command, folder / "runs" / name)


def outcome(command: list[str], run: Path) -> dict[str, Any]:
    """Run a command of ours and read its run folder."""
    seen: dict[str, tuple[float, float]] = {}

    def look(seconds: float, cpu_s: float) -> None:
        """When the run folder first held something, in seconds since the process began, and the CPU's."""
        log = run / "metrics.jsonl"
        text = log.read_text() if log.exists() else ""
        phases = {"planned": (run / "plan.json").exists()}
        phases |= {"evaluated": '"eval"' in text, "first_step": '"loss_scale"' in text}
        for phase, there in phases.items():
            if there:
                seen.setdefault(phase, (round(seconds, 1), round(cpu_s, 1)))

    peak = watched(command, os.environ, look)
    steps = step_rows(run)
    plan = json.loads((run / "plan.json").read_text())
    return {
        "peak_bytes": peak,
        "step_s": statistics.median(row["step_s"] for row in steps[1:] or steps),
        "first_step_s": seen["first_step"][0],
        "phases": seen,
        "losses": [round(row["loss"], 3) for row in steps],
        "planned": plan["peak_bytes"],
    }


def peer(name: str, folder: Path, tiny: bool) -> dict[str, Any]:
    """One run of a peer, in a process of its own."""
    command = command_of("runs.finetune_memory", "--worker", name, "--folder", str(folder), *["--tiny"] * tiny)
    peak = watched(command, os.environ | RETURNS_FREED)
    return {"peak_bytes": peak} | json.loads((folder / f"{name}.json").read_text())


def watched(command: list[str], environ: Any, look: Callable[[float, float], None] | None = None) -> int:
    """Run a command; the peak of its resident memory in bytes, or of it and its children where they have more.

    Pages that processes share count once: of a family it is the sum of proportional set sizes.
    """
    child = subprocess.Popen(command, env=dict(environ), stdout=subprocess.DEVNULL)
    process, peak, began = psutil.Process(child.pid), 0, time.perf_counter()
    while child.poll() is None:
        try:
            children = process.children(recursive=True)
            now = sum(one.memory_full_info().pss for one in (process, *children)) if children else 0
            high = [line for line in Path(f"/proc/{child.pid}/status").read_text().splitlines() if "VmHWM" in line]
            peak = max(peak, now, *(int(line.split()[1]) * 1024 for line in high))
            if look is not None:
                look(time.perf_counter() - began, sum(process.cpu_times()[:2]))
        except (psutil.NoSuchProcess, FileNotFoundError):  # it has just ended
            pass
        time.sleep(0.1)
    if child.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ended with code {child.returncode}")
    return peak


# ---- the peers ----


def batches(folder: Path) -> np.ndarray:
    """Rows of tokens, [STEPS * BATCH, SEQ]: as many as ours, of the same text."""
    from tilewright.data.common.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / "model")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((folder / "text").glob("*.txt")))
    ids = tokenizer.encode(text[: SEQ * BATCH * STEPS * 8])
    return np.array(ids[: SEQ * BATCH * STEPS], np.int64).reshape(-1, SEQ)


def worker(name: str, folder: Path) -> None:
    """Train a peer's steps; its losses and median seconds into a file."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(psutil.cpu_count(logical=False) or 1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.config.use_cache = False
    run = train_trainer if name == "trainer" else train_in_backward
    losses, seconds = run(model, batches(folder), folder)
    (folder / f"{name}.json").write_text(json.dumps({"losses": losses, "step_s": statistics.median(seconds[1:])}))


def train_trainer(model: Any, rows: np.ndarray, folder: Path) -> tuple[list[float], list[float]]:
    """Hugging Face's Trainer."""
    import torch

    clock = step_clock()
    data = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows]
    hf_trainer(
        model, data, str(folder / "trainer"), clock, per_device_train_batch_size=BATCH, max_steps=STEPS,
        gradient_checkpointing=True, optim="adamw_torch_8bit", learning_rate=1e-5, adam_beta2=0.999, weight_decay=0.0,
        logging_steps=1, use_cpu=True,
    ).train()  # fmt: skip
    return clock.losses, np.diff(clock.times).tolist()


def train_in_backward(model: Any, rows: np.ndarray, folder: Path) -> tuple[list[float], list[float]]:
    """Each parameter's update as soon as its gradient is there; the head's loss in checkpointed chunks of tokens."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from torchao.optim import AdamW8bit

    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizers = {param: AdamW8bit([param], lr=1e-5, bf16_stochastic_round=True) for param in model.parameters()}

    def update(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    losses, seconds = [], []
    for start in range(0, len(rows), BATCH):
        began = time.perf_counter()
        ids = torch.from_numpy(rows[start : start + BATCH])
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        parts = zip(hidden.split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
        total = sum(checkpoint(chunk_loss, part, labels, use_reentrant=False) for part, labels in parts)
        loss = total / len(hidden)
        loss.backward()
        losses.append(round(loss.item(), 3))
        seconds.append(time.perf_counter() - began)
    return losses, seconds


# ---- all rows ----


def main() -> None:
    """All rows in turns, and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[*OURS, *PEERS, START], choices=[*OURS, *PEERS, START])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder)
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.rows}
    with Stolen() as stolen, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = "from pathlib import Path; from benchmarks.runs.finetune_memory import make_folder; "
        subprocess.run([sys.executable, "-c", f"{make}make_folder(Path({name!r}), {args.tiny})"], check=True)
        for _ in range(args.rounds):
            for row in args.rows:
                one = start(folder) if row == START else None
                found[row].append(one or (ours(row, folder) if row in OURS else peer(row, folder, args.tiny)))
                print(row, json.dumps(found[row][-1]), flush=True)
    results: dict[str, Any] = {"tokens_per_step": BATCH * SEQ, "steps": STEPS, "stolen_share": stolen.share}
    for row, runs in found.items():
        results[row] = {key: spread([run[key] for run in runs]) for key in ("peak_bytes", "step_s")}
        results[row] |= {key: runs[0][key] for key in ("losses", "planned", "phases") if key in runs[0]}
        if "first_step_s" in runs[0]:
            results[row]["first_step_s"] = spread([run["first_step_s"] for run in runs])
    for row in (name for name in args.rows if name in OURS):
        for other in (name for name in args.rows if name in PEERS):
            times = [mine["step_s"] / theirs["step_s"] for mine, theirs in zip(found[row], found[other], strict=True)]
            sizes = [
                mine["peak_bytes"] / theirs["peak_bytes"] for mine, theirs in zip(found[row], found[other], strict=True)
            ]
            results[f"{row} against {other}"] = {"step_s_ratio": spread(times), "peak_ratio": spread(sizes)}
    if not args.tiny:
        write_result(f"finetune_memory_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
