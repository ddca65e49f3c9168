"""Answers of a fine-tuned model on a task with known answers: ours beside plain loops in FP32.

A small Llama is trained from scratch here, in a plain loop, on text: a word, and behind it the word in capitals or each
letter's successor, as chance has it. Fine-tuning teaches it to answer conversations about other words: what is asked
for decides which of the two is the answer. Counted is how many answers to held-out questions are right to the last
letter, decoded greedily by transformers from what each way leaves on disk.

full, lora, lora_fp8   `tilewright finetune --how`, adapters merged by `tilewright merge`
plain_full, plain_lora the same examples, batch size, learning rate and schedule in a loop of transformers, peft and
                       torch alone, in FP32
dpo, plain_dpo         from the model of `full`: the right answer preferred to the other one; mean margin of held-out
                       pairs, by one FP32 formula for both

python -m benchmarks.runs.finetune_quality [--seeds 3] [--steps 200]
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.common import write_result

CLAIM = "full, LoRA and FP8 LoRA answer as many held-out questions as the FP32 loop, to 1 point, three seeds"
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
LETTERS, WORD = string.ascii_lowercase[:10], 4
TRAIN, TEST, BATCH, SEQ = 2000, 500, 16, 128
LR = {"full": 5e-4, "lora": 5e-3}
RANK, ALPHA = 16, 32.0
END = "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TASKS: dict[str, Callable[[str], str]] = {
    "next": lambda word: "".join(chr(ord(x) + 1) for x in word),
    "capitals": str.upper,
}
Pairs = list[tuple[str, str, str]]
"""Question, right answer, the other task's answer."""


# ---- data ----


def questions(count: int, seed: int) -> Pairs:
    """Distinct questions and their answers; each word is asked about once, so that no held-out word was answered."""
    rng, words = random.Random(seed), {}
    while len(words) < count:
        words["".join(rng.choices(LETTERS, k=WORD))] = rng.choice(list(TASKS))
    other = {"next": "capitals", "capitals": "next"}
    return [(f"{task}: {word}", TASKS[task](word), TASKS[other[task]](word)) for word, task in words.items()]


def make_tokenizer(folder: Path) -> Any:
    """Bytes, the tokens of ChatML, and its template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", END]
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=special[0], bos_token=special[0]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def pretrain(folder: Path, steps: int) -> float:
    """Train the model from scratch on text without a task, in FP32; its last losses' mean."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **SHAPE))
    rng, losses = random.Random(99), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 2 * (steps - step) / steps)
        words = ["".join(rng.choices(LETTERS, k=WORD)) for _ in range(2 * BATCH)]
        lines = []
        for word in words:
            ids, _ = encode(tokenizer, word, TASKS[rng.choice(list(TASKS))](word))
            lines.append(ids)
        ids = torch.tensor(lines)
        loss = net(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    net.save_pretrained(folder)
    return statistics.mean(losses[-20:])


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of a conversation of one turn, and their targets."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    prompt = prompt["input_ids"]
    learned = tokenizer(answer + END)["input_ids"]
    ids = prompt + learned + tokenizer("\n")["input_ids"]
    return ids, [-100] * len(prompt) + learned + [-100]


def padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and targets; padding on the right."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, mask, labels


# ---- plain loops ----


def rates(lr: float, steps: int) -> list[float]:
    """A linear warm-up over a tenth, at most ten steps, and a cosine to zero: what the recipes do."""
    warmup = min(10, steps // 10)
    return [
        lr * (step + 1) / warmup
        if step < warmup
        else lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
        for step in range(steps)
    ]


def with_adapters(net: Any) -> Any:
    """peft's, on all linear layers."""
    import peft

    return peft.get_peft_model(net, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))


def plain(base: Path, data: Pairs, how: str, seed: int, steps: int, per_step: int, out: Path) -> None:
    """transformers, peft and torch alone, FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    net = with_adapters(net) if how == "lora" else net
    net.train()
    encoded = [encode(tokenizer, question, answer) for question, answer, _ in data]
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999), weight_decay=0.0)
    rng, order = random.Random(seed), []
    for rate in rates(LR[how], steps):
        if len(order) < per_step:
            order += rng.sample(encoded, len(encoded))
        ids, mask, labels = padded([order.pop() for _ in range(per_step)])
        logits = net(input_ids=ids, attention_mask=mask).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    net = net.merge_and_unload() if how == "lora" else net
    net.save_pretrained(out)
    tokenizer.save_pretrained(out)


# ---- ours ----


def tilewright(*arguments: object) -> None:
    """One command, in a process of its own."""
    command = [sys.executable, "-m", "tilewright", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def run_settings(root: Path, name: str, seed: int, steps: int) -> list[str]:
    """What all of our runs have in common."""
    values = {
        "run.dir": root / "runs", "run.name": name, "run.seed": seed, "run.threads": torch.get_num_threads(),
        "data.cache_dir": root / "cache", "data.seq_len": SEQ, "data.holdout": 0.01, "train.steps": steps,
        "train.compile": "off", "train.sample_tokens": 0, "train.eval_interval": 0, "checkpoint.interval": 0,
        "checkpoint.interval_minutes": 0, "log.report": "false",
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


def ours(base: Path, data: Path, how: str, seed: int, steps: int, root: Path) -> Path:
    """`tilewright finetune`, and the folder of the whole model."""
    name = f"{how}-{seed}"
    settings = [*run_settings(root, name, seed, steps), f"--train.global_batch_size={BATCH}"]
    settings += [f"--train.micro_batch_size={BATCH}", f"--optim.lr={LR['full' if how == 'full' else 'lora']}"]
    tilewright("finetune", base, data, "--how", how, *settings)
    if how == "full":
        return root / "runs" / name / "hf"
    tilewright("merge", root / "runs" / name, "--out", root / name, "--format", "fp32")
    return root / name


# ---- what came of it ----


@torch.no_grad()
def accuracy(folder: Path, data: Pairs) -> float:
    """Share of held-out questions answered right to the end of the turn, in per cent; greedy, FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    lengths: dict[int, list[tuple[list[int], list[int]]]] = {}
    for question, answer, _ in data:
        ids, labels = encode(tokenizer, question, answer)
        learned = [label for label in labels if label != -100]
        lengths.setdefault(len(ids) - len(learned) - 1, []).append((ids, learned))
    for start, rows in lengths.items():
        ids = torch.tensor([row[:start] for row, _ in rows])
        for _ in range(len(rows[0][1])):
            ids = torch.cat((ids, net(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
        right += sum(made[start:].tolist() == learned for made, (_, learned) in zip(ids, rows, strict=True))
    return 100 * right / len(data)


def log_probs(net: Any, tokenizer: Any, rows: list[tuple[str, str]]) -> torch.Tensor:
    """Sum of the answers' log probabilities, [N]."""
    ids, mask, labels = padded([encode(tokenizer, *row) for row in rows])
    logps = net(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    picked = logps.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (picked * (wanted != -100)).sum(-1)


def margins(net: Any, frozen: Any, tokenizer: Any, data: Pairs, beta: float) -> torch.Tensor:
    """Of each pair: beta times how much more the chosen answer has gained than the other; formula 7 of the paper."""
    sides = [[(question, pair[side]) for question, *pair in data] for side in (0, 1)]
    gains = []
    for rows in sides:
        with torch.no_grad():
            before = log_probs(frozen, tokenizer, rows)
        gains.append(log_probs(net, tokenizer, rows) - before)
    return beta * (gains[0] - gains[1])


def dpo(base: Path, data: Pairs, held: Pairs, root: Path, steps: int) -> dict[str, Any]:
    """Ours and the plain loop from the same model; the margins of held-out pairs after it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, beta, lr, pairs = root / "pairs.jsonl", 0.1, 5e-4, 8
    rows = [{"prompt": question, "chosen": good, "rejected": bad} for question, good, bad in data]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = run_settings(root, "dpo", 0, steps)
    settings += [f"--model.path={base}", f"--data.source={file}", f"--train.dpo_beta={beta}", f"--optim.lr={lr}"]
    settings += ["--checkpoint.export_hf=true", f"--train.global_batch_size={2 * pairs}", "--train.micro_batch_size=16"]
    settings += ["--optim.warmup_steps=10", "--model.kind=decoder"]
    tilewright("train", "dpo", *settings)
    tilewright("merge", root / "runs" / "dpo", "--out", root / "dpo", "--format", "fp32")
    tokenizer = AutoTokenizer.from_pretrained(base)
    frozen, net, ours_net = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (base, base, root / "dpo")
    )
    torch.manual_seed(0)
    net = with_adapters(net)
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.0)
    rng, order = random.Random(0), []
    for step in range(steps):
        if len(order) < pairs:
            order += rng.sample(data, len(data))
        loss = -torch.nn.functional.logsigmoid(
            margins(net, frozen, tokenizer, [order.pop() for _ in range(pairs)], beta)
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rates(lr, steps)[step]
        optimizer.step()
    with torch.no_grad():
        found = {
            name: margins(model, frozen, tokenizer, held, beta) for name, model in (("ours", ours_net), ("plain", net))
        }
    return {
        name: {"margin": round(float(values.mean()), 4), "raised_share": float((values > 0).float().mean())}
        for name, values in found.items()
    }


def main() -> None:
    """All ways, all seeds, and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pretrain", type=int, default=500)
    parser.add_argument("--base", type=Path, help="a model that an earlier run of this script has trained")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data, held = questions(TRAIN + TEST, 1)[:TRAIN], questions(TRAIN + TEST, 1)[TRAIN:]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        base, file = root / "base", root / "talks.jsonl"
        if args.base is None:
            print(f"base: loss {pretrain(base, args.pretrain):.3f}", flush=True)
        else:
            shutil.copytree(args.base, base)
        before = accuracy(base, held)
        print(f"base: {before:.1f} %, {time.perf_counter() - began:.0f} s", flush=True)
        talks = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer, _ in data
        ]
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        found: dict[str, list[float]] = {}
        per_step = conversations_per_step(base, data)
        for seed in range(args.seeds):
            for how in ("full", "lora", "lora_fp8"):
                found.setdefault(how, []).append(accuracy(ours(base, file, how, seed, args.steps, root), held))
                print(seed, how, found[how][-1], f"{time.perf_counter() - began:.0f} s", flush=True)
            for how in ("full", "lora"):
                plain(base, data, how, seed, args.steps, per_step, root / f"plain_{how}-{seed}")
                found.setdefault(f"plain_{how}", []).append(accuracy(root / f"plain_{how}-{seed}", held))
                print(seed, "plain", how, found[f"plain_{how}"][-1], f"{time.perf_counter() - began:.0f} s", flush=True)
        margin = dpo(root / "runs" / "full-0" / "hf", data, held, root, 60)
        print(margin)
    means = {how: round(statistics.mean(values), 2) for how, values in found.items()}
    results: dict[str, Any] = {"base": before, "accuracy": found, "mean": means, "dpo": margin}
    results["points_to_plain_full"] = {how: round(mean - means["plain_full"], 2) for how, mean in means.items()}
    results |= {"conversations": TRAIN, "held_out": TEST, "steps": args.steps, "seconds": time.perf_counter() - began}
    results["conversations_per_step"] = per_step
    write_result("finetune_quality", CLAIM, results)


def conversations_per_step(base: Path, data: Pairs) -> int:
    """As many as a step of packed rows holds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    longest = max(len(encode(tokenizer, question, answer)[0]) for question, answer, _ in data[:100])
    return BATCH * (SEQ // longest)


if __name__ == "__main__":
    main()
