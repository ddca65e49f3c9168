"""Our models in lm-evaluation-harness: equal to its own class for Hugging Face models, and to plain PyTorch."""

import json
import logging
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from tests.cli.tuned import SHAPE, make_model
from tests.integrations.harness import QUESTIONS, make_tasks
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.integrations.lm_eval.guard import contained
from tilewright.integrations.lm_eval.model import TilewrightLM
from tilewright.integrations.lm_eval.run_tasks import run_tasks
from tilewright.integrations.lm_eval.task_set import TaskSet
from tilewright.integrations.lm_eval.text_codec import TextCodec
from tilewright.models.build import build_model
from tilewright.training.runlog.task_scores import RUN

LENGTH = 48
ROUNDING = 1e-4
"""Sums of some tens of log probabilities in FP32, in another order."""

PAIRS = [
    ("hello Paris", " Yes"),
    ("hello Paris", " no"),
    ("hello Paris ", "Yes, the weather!"),
    ("", "Paris"),
    ("", "<s>"),
    ("Zürich 你好", "🦊 ä"),
    ("the weather " * 40, "is long"),
    ("x", "the answers " * 8),
    ("hello\n", "\n"),
]
TEXTS = ["", "Paris", "the weather and the answers " * 20, "Zürich 🦊 你好 " * 9]


def mla_model(folder: Path) -> Path:
    """A small DeepSeek-V3 of dense layers beside the other's tokenizer."""
    make_model(folder, "llama")
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    torch.manual_seed(1)
    config = DeepseekV3Config(
        **shape, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=2,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["decoder-llama", "hf-llama", "hf-qwen3", "decoder-mla"])
def both(request, tmp_path_factory):
    """Our adapter and the harness' own class, on one folder."""
    kind, name = request.param.split("-")
    folder = tmp_path_factory.mktemp(name) / "model"
    folder = mla_model(folder) if name == "mla" else make_model(folder, name)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=LENGTH, batch_size=3)
    return adapter(folder, kind), theirs, folder, kind


def adapter(folder, kind, **options):
    tokenizer = load_tokenizer(folder)
    section = ModelSection(kind=kind, path=str(folder), weights="load")
    model = build_model(section, tokenizer.vocab_size, device="cpu").eval()
    options = {"max_length": LENGTH, "batch_size": 3} | options
    return TilewrightLM(model, TextCodec.of(tokenizer, folder), **options)


def requests(kind, arguments):
    return [Instance(kind, {}, args if isinstance(args, tuple) else (args,), i) for i, args in enumerate(arguments)]


def assert_close(ours, theirs):
    worst = max(range(len(ours)), key=lambda i: abs(ours[i] - theirs[i]))
    assert abs(ours[worst] - theirs[worst]) < ROUNDING, (worst, ours[worst], theirs[worst])


def test_log_likelihoods_are_those_of_the_harness(both):
    ours, theirs, _, _ = both
    asked = requests("loglikelihood", PAIRS)
    mine, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True)
    assert_close([score for score, _ in mine], [score for score, _ in expected])
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in expected]
    assert any("cut from the left" in note for note in ours.notes)


def test_rolling_log_likelihoods_are_those_of_the_harness(both):
    ours, theirs, _, _ = both
    asked = requests("loglikelihood_rolling", TEXTS)
    assert_close(ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked, disable_tqdm=True))


def test_generated_texts_are_those_of_the_harness(both):
    ours, theirs, _, _ = both
    settings = [{"until": ["\n\n", "e"], "max_gen_toks": 20}, {"until": [], "max_gen_toks": 9, "do_sample": False}]
    contexts = ["hello", "the weather " * 40, "Zürich 你好", "hello Paris, the system", "answers"]
    asked = requests("generate_until", [(context, kwargs) for kwargs in settings for context in contexts])
    mine = ours.generate_until(asked)
    theirs.batch_size_per_gpu = 1  # rows of a batch are padded there, and a mask rounds otherwise
    assert mine == theirs.generate_until(asked, disable_tqdm=True)
    assert any(mine)


def test_the_batch_size_changes_nothing(both):
    _, _, folder, kind = both
    ours, alone = adapter(folder, kind, batch_size=7), adapter(folder, kind, batch_size=1)
    asked = requests("loglikelihood", PAIRS)
    assert_close([score for score, _ in ours.loglikelihood(asked)], [score for score, _ in alone.loglikelihood(asked)])
    contexts = ["hello", "the weather " * 9, "Zürich", "hello Paris"]
    asked = requests("generate_until", [(context, {"until": ["\n"], "max_gen_toks": 16}) for context in contexts])
    assert ours.generate_until(asked) == alone.generate_until(asked)


@torch.no_grad()
def test_local_tasks_give_what_plain_pytorch_gives(both, tmp_path):
    ours, _, folder, _ = both
    with contained():
        tasks = TaskSet(["local_choice", "local_write"], make_tasks(tmp_path / "tasks"))
        rows = run_tasks(ours, tasks, name="model", role=RUN)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    backend = ours.codec.backend

    def log_likelihood(context, answer):
        ids, start = backend.encode(context + answer).ids, len(backend.encode(context).ids)
        log_probs = net(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids)))

    right = [
        max(range(3), key=lambda i: log_likelihood(row["question"], " " + row["choices"][i])) == row["answer"]
        for row in QUESTIONS
    ]
    by_task = {row.task: row for row in rows}
    assert by_task["local_choice"].value == sum(right) / len(right)
    assert by_task["local_choice"].conditions.samples == 4
    assert by_task["local_choice"].conditions.version == "2.0"
    assert by_task["local_choice"].stderr is not None

    def write(context):
        ids = backend.encode(context).ids
        start = len(ids)
        while len(ids) - start < 12 and ids[-1] != ours.eot_token_id:
            ids.append(int(net(torch.tensor([ids])).logits[0, -1].argmax()))
        return backend.decode(ids[start:]).split("\n\n")[0].split("?")[0]

    same = [write(row["question"]) == row["choices"][0] for row in QUESTIONS]
    assert by_task["local_write"].value == sum(same) / len(same)


def test_few_shot_and_limit(both, tmp_path):
    ours, _, _, _ = both
    with contained():
        tasks = TaskSet(["local_choice"], make_tasks(tmp_path / "tasks"), num_fewshot=2)
        (row,) = run_tasks(ours, tasks, name="model", role=RUN, limit=3)
    assert (row.conditions.num_fewshot, row.conditions.limit, row.conditions.samples) == (2, 3, 3)


def test_chat_templates_are_those_of_transformers(both):
    _, theirs, folder, kind = both
    ours = adapter(folder, kind, chat=ChatTemplate.load(str(folder), load_tokenizer(folder)))
    talk = [{"role": "user", "content": "hello Paris"}, {"role": "assistant", "content": "Yes, "}]
    for open_end, messages in ((True, talk[:1]), (False, talk)):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=open_end).rstrip(" ")
        mine = ours.apply_chat_template(messages, add_generation_prompt=open_end)
        assert mine.rstrip(" ") == expected
        assert ours.tok_encode(mine) == theirs.tok_encode(mine)


@pytest.mark.parametrize("flag", [True, False, None])
def test_what_begins_a_text_is_what_transformers_begins_it_with(tmp_path, flag):
    folder = make_model(tmp_path / "model", "llama")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("add_bos_token", None)
    file.write_text(json.dumps(config | ({} if flag is None else {"add_bos_token": flag})))
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32")
    ours = adapter(folder, "decoder")
    for text in ("hello Paris", ours.codec.decode([ours.prefix_token_id], skip_special=False) + "hello"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.prefix_token_id == theirs.prefix_token_id


def test_a_model_trained_here_sees_the_begin_of_a_document(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path / "model", "llama"))
    codec = TextCodec.of(tokenizer, None)
    assert codec.encode("hello")[0] == tokenizer.bos_id
    assert codec.encode("hello", special=False) == codec.encode("hello")[1:]


def test_the_harness_leaves_no_traces(tmp_path):
    environ, level = dict(os.environ), logging.getLogger("lm_eval").level
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
    with contained():
        os.environ["HF_XET_HIGH_PERFORMANCE"] = "1"
        TaskSet(["local_write"], make_tasks(tmp_path / "tasks"))
        torch.rand(1), np.random.rand(), random.random()
    assert dict(os.environ) == environ
    assert logging.getLogger("lm_eval").level == level
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.random.get_rng_state(), states[2])


def test_what_cannot_be_evaluated_is_told(both, tmp_path):
    ours, _, _, _ = both
    folder = make_tasks(tmp_path / "tasks")
    text = (folder / "write.yaml").read_text()
    (folder / "lost.yaml").write_text(text.replace("local_write", "lost").replace("questions.jsonl", "lost.jsonl"))
    (folder / "odd.yaml").write_text(text.replace("local_write", "odd").replace("{{question}}", "{{ query | nope }}"))
    (folder / "long.yaml").write_text(text.replace("local_write", "long").replace("toks: 12", "toks: 48"))
    (folder / "beams.yaml").write_text(
        text.replace("local_write", "beams").replace("do_sample", "num_beams: 4, do_sample")
    )
    with contained():
        for name in ("lost", "odd"):
            with pytest.raises(DataError, match=f"task {name}"):
                TaskSet([name], folder)
        with pytest.raises(ConfigError, match="longer answers"):
            run_tasks(ours, TaskSet(["long"], folder), name="model", role=RUN)
        with pytest.raises(ConfigError, match="num_beams = 4"):
            run_tasks(ours, TaskSet(["beams"], folder), name="model", role=RUN)
        with pytest.raises(ConfigError, match="No folder of tasks"):
            TaskSet(["lost"], tmp_path / "nowhere")
    with pytest.raises(DataError, match="longer than the model's context"):
        ours.loglikelihood(requests("loglikelihood", [("a", "the weather " * 60)]))
