"""Supervised fine-tuning equals a plain loop in FP32 over single conversations, written with torch alone."""

import json
import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.data.chat.families import make_folder
from tests.training.tiny import rows, tiny
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.trained_tokens import samples
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.report.page import render
from tilewright.report.run_data.before_after import changes as changes_of
from tilewright.report.run_data.collect_run import collect
from tilewright.training.assemble import build, set_up
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")

WORDS = ("hello", "you", "are", "a", "system", "that", "answers", "questions", "the", "weather", "Paris", "yes", "no")


def make_model(folder):
    """A Llama of two layers with random weights, its tokenizer and its template."""
    make_folder(folder, "llama3")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocab = load_tokenizer(folder).vocab_size
    config = transformers.LlamaConfig(vocab_size=vocab, num_key_value_heads=2, max_position_embeddings=128, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def talks(num, seed=0):
    rng = random.Random(seed)

    def say():
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 9)))

    return [
        [
            message
            for _ in range(rng.randint(1, 3))
            for message in ({"role": "user", "content": say()}, {"role": "assistant", "content": say()})
        ]
        for _ in range(num)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks(60)))
    return folder


def sft(chats, model, runs, **changes):
    given = {
        "data__source": chats / "a.jsonl",
        "data__cache_dir": chats / "cache",
        "data__format": "chat",
        "data__seq_len": 128,
        "data__holdout": 0.1,
        "model__kind": "hf",
        "model__path": model,
        "model__weights": "load",
        "precision__mode": "fp32",
        "train__global_batch_size": 4,
        "train__micro_batch_size": 2,
        "train__eval_interval": 0,
        "train__sample_tokens": 0,
        "checkpoint__interval": 0,
        "optim__clip_norm": 0.0,
        "optim__warmup_steps": 0,
        "optim__schedule": "constant",
        "optim__weight_decay": 0.0,
    }
    return tiny(chats, runs, **given | changes)


def conversations(batch):
    """(ids, targets) of each conversation of packed rows; a target is -100 where the label is none."""
    for ids, labels, segments in zip(batch["input_ids"], batch["labels"], batch["segments"], strict=True):
        for segment in range(int(segments.max()) + 1):
            mine = segments == segment
            yield ids[mine], labels[mine]


def plain_gradients(net, batches):
    """Mean loss over the trained tokens of all batches; one conversation at a time, and its gradient in `net`."""
    net.zero_grad()
    total = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    loss = 0.0
    for batch in batches:
        for ids, labels in conversations(batch):
            logits = net(input_ids=ids[None]).logits[0]
            part = cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum") / total
            part.backward()
            loss += float(part.detach())
    return loss


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("decoder", 15), *(pytest.param(kind, 50, marks=pytest.mark.slow) for kind in ("hf", "decoder"))],
)
def test_gradients_and_losses_are_those_of_a_plain_loop(kind, steps, model, chats, tmp_path):
    loaded = sft(chats, model, tmp_path, model__kind=kind, train__steps=steps, optim__lr=1e-3)
    setup = set_up(loaded)
    parts = build(setup, fresh=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    prefix = "net." if kind == "hf" else ""
    for step in range(steps):
        batches = parts.stream.next_step()
        expected = plain_gradients(reference, batches)
        if step == 0:
            scale = sum(int((b["labels"] != -100).sum()) for b in batches)
            for batch in batches:
                (parts.model.loss(batch).loss_sum / scale).backward()
            theirs = dict(reference.named_parameters())
            ours = dict(parts.model.named_parameters())
            assert {name.removeprefix(prefix) for name in ours} == set(theirs)
            for name, param in ours.items():
                want = theirs[name.removeprefix(prefix)].grad
                # 1e-5 of the largest element: sums of a few thousand FP32 products in another order
                assert (param.grad - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max())), name
            parts.model.zero_grad()
        result = parts.executor.step(batches, 1e-3)
        optimizer.step()
        assert result.loss == pytest.approx(expected, abs=1e-4)
    parts.close()


def test_prompts_contribute_exactly_nothing(model, chats, tmp_path):
    setup = set_up(sft(chats, model, tmp_path))
    parts = build(setup, fresh=True)
    batch = parts.stream.next_step()[0]
    template = ChatTemplate.load(str(model), load_tokenizer(model))
    answers = {tuple(sample.ids_T[sample.trained_T].tolist()) for t in talks(60) for sample in samples(template, t)}
    for _, labels in conversations(batch):
        assert tuple(labels[labels != -100].tolist()) in answers
    # the loss reads no label of a prompt: its gradient in the logits there is exactly zero
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, labels in conversations(batch):
        logits = reference(input_ids=ids[None]).logits[0].detach().requires_grad_()
        cross_entropy(logits, labels, ignore_index=-100, reduction="sum").backward()
        assert (logits.grad[labels == -100] == 0).all()
    # changing what stands behind the last answer, or padding, changes no bit
    changed = dict(batch)
    changed["input_ids"] = torch.where(batch["segments"] < 0, 5, batch["input_ids"])
    parts.model.eval()
    assert torch.equal(parts.model.loss(batch).loss_sum, parts.model.loss(changed).loss_sum)
    parts.close()


def test_a_run_tells_what_it_trains_and_leaves_a_folder_that_can_chat(model, chats, tmp_path):
    result = train(sft(chats, model, tmp_path, train__steps=2, checkpoint__export_hf="true", train__sample_tokens=4))
    told = [row["message"] for row in rows(result.run_dir / "events.jsonl") if row["kind"] == "chat"]
    assert any("messages (60)" in text for text in told)
    assert any("[[" in text for text in told)
    facts = json.loads((result.run_dir / "data.json").read_text())["chat"]
    assert facts["example"]["spans"]
    for folder in (result.run_dir, result.run_dir / "hf"):
        template = ChatTemplate.load(str(folder), load_tokenizer(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        talk = talks(1)[0]
        assert template.encode(talk) == theirs.apply_chat_template(talk)["input_ids"]
        original = ChatTemplate.load(str(model), load_tokenizer(model))
        assert template.encode(talk) == original.encode(talk)


def test_the_model_before_training_is_evaluated_and_answers_the_same_prompts(model, chats, tmp_path):
    (tmp_path / "prose").mkdir()
    for number in range(40):
        (tmp_path / "prose" / f"{number}.txt").write_text(f"Text {number} on the weather in Paris, {number * 7} lines.")
    changes = {
        "data__eval_source": str(tmp_path / "prose"),
        "train__steps": 12,
        "train__sample_tokens": 24,
        "optim__lr": 1e-2,
        "data__holdout": 0.2,
        "train__eval_batches": 4,
    }
    loaded = sft(chats, model, tmp_path, **changes)
    result = train(loaded)
    evals = [row for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row]
    assert [row["step"] for row in evals] == [0, 12]
    (name,) = evals[0]["eval"]
    before, after = (row["eval"][name] for row in evals)
    assert after["loss"] < before["loss"]
    # what was loaded, by a plain loop over the same held-out conversations
    parts = build(set_up(sft(chats, model, tmp_path / "again", **changes)), fresh=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    other = parts.setup.other_text.batches
    assert {domain for row in evals for domain in row["eval_other"]} == set(other) != set()
    others = ((evals[0]["eval_other"][domain], batches) for domain, batches in other.items())
    for found, batches in ((before, parts.held_out.batches[name]), *others):
        with torch.no_grad():
            loss = total = 0.0
            for ids, labels in (pair for batch in batches for pair in conversations(batch)):
                loss += float(cross_entropy(reference(input_ids=ids[None]).logits[0], labels, reduction="sum"))
                total += int((labels != -100).sum())
        assert found["tokens"] == total > 0
        assert found["loss"] == pytest.approx(loss / total, rel=1e-5)
    parts.close()
    shown = changes_of(collect(result.run_dir))
    assert [(row.domain, row.trained) for row in shown] == [
        (name, True),
        *((domain, False) for domain in sorted(other)),
    ]
    # three held-out questions, answered before and after
    samples_rows = rows(result.run_dir / "samples.jsonl")
    first, last = ([row for row in samples_rows if row["step"] == step] for step in (0, 12))
    assert len(first) == 3
    assert [row["prompt"] for row in first] == [row["prompt"] for row in last]
    answers = {m["content"] for talk in talks(60) for m in talk if m["role"] == "assistant"}
    for row in last:
        assert row["reference"].strip() in answers
        assert row["reference"] not in row["prompt"].split("assistant")[-1]
    assert [row["text"] for row in first] != [row["text"] for row in last]
    page = render(collect(result.run_dir))
    for text in ("Before training", "After step 12", "In the data", f"{before['loss']:.3f}", f"{after['loss']:.3f}"):
        assert text in page, text


def test_a_run_from_random_weights_is_not_evaluated_before_its_first_step(data, tmp_path):
    result = train(tiny(data, tmp_path, train__steps=2))
    assert min(row["step"] for row in rows(result.run_dir / "metrics.jsonl") if "eval" in row) > 0
