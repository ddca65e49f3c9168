"""Where an answer ends: in `chat` and `serve` exactly where transformers' `generate` ends it, for published layouts, of
a model as it was published, tuned, merged and exported. The ids that a model says are given by a script."""

import json
import subprocess
import sys

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from tests.cli.tuned import MODELS, SHAPE, arguments, make_talks
from tests.data.chat.families import FAMILIES, make_folder
from tests.serving.scripted import PROMPT, scripted
from tilewright.cli.app import run
from tilewright.cli.load_run import open_to_export
from tilewright.cli.open_model import open_model
from tilewright.compress.export.gguf import F16
from tilewright.models.sampling import Sampling
from tilewright.serving.session import AnswerSettings
from tilewright.training.components.tokenizer_files import template_folder

PUBLISHED = ("qwen3", "llama31", "phi3", "glm4", "gemma", "mistral", "zephyr", "smollm")
BYTE_LEVEL = tuple(name for name in PUBLISHED if not FAMILIES[name].metaspace)
"""Those whose tokenizer llama.cpp's byte-level BPE is."""
LENGTH = 6


class Forced(LogitsProcessor):
    """What is drawn next is what the script says."""

    def __init__(self, script, prompt):
        self.script, self.prompt = script, prompt

    def __call__(self, input_ids, scores):
        at = input_ids.shape[1] - self.prompt
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.script[at]] = 0
        return forced


def theirs(folder, scripts):
    """New ids of transformers' `generate` for each script, the end included."""
    net = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([PROMPT])
    found = []
    for script in scripts:
        forced = [Forced(script, len(PROMPT))]
        written = net.generate(prompt, max_new_tokens=len(script), do_sample=False, logits_processor=forced)
        found.append(written[0, len(PROMPT) :].tolist())
    return found


def ours(opened, scripts):
    """The same of an answer in `chat` and `serve`: what was drawn, and the end where one was met."""
    found = []
    for script in scripts:
        session = scripted(script, opened.tokenizer, opened.chat)
        answer = session.answer(PROMPT, AnswerSettings(len(script), Sampling(0)), turn=True)
        "".join(answer)
        found.append(script[: answer.num_tokens + (answer.finish_reason == "stop")])
    return found


def scripts_of(tokenizer):
    """One for each special or added token: it comes third, between tokens of text."""
    added = sorted(tokenizer.backend.get_added_tokens_decoder())
    plain = tokenizer.encode("hello you are a system")[:5]
    return [[*plain[:2], token, *plain[2:]] for token in added]


def ends(found, scripts):
    return {script[2] for ids, script in zip(found, scripts, strict=True) if len(ids) < len(script)}


def make(folder, name, kind="llama", **config):
    """A published model's folder, of random weights."""
    torch.manual_seed(0)
    configured, net = MODELS[kind]
    net(configured(**(SHAPE | config))).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    family = FAMILIES[name]
    make_folder(folder, name)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(family.stops))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = ids if name == "llama31" else ids[0]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_of_a_published_model_ends_where_transformers_ends_it(name, tmp_path):
    folder = make(tmp_path / "model", name, vocab_size=1000)
    opened = open_model(str(folder), device="cpu")
    scripts = scripts_of(opened.tokenizer)
    assert ours(opened, scripts) == theirs(folder, scripts)
    assert {opened.tokenizer.backend.id_to_token(i) for i in ends(ours(opened, scripts), scripts)} == set(
        FAMILIES[name].stops
    )


@pytest.mark.parametrize("eos", [0, [0, 1], None])
def test_without_a_generation_config_the_models_own_is_what_counts(eos, tmp_path):
    folder = make(tmp_path / "model", "qwen3", vocab_size=1000)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    opened = open_model(str(folder), device="cpu")
    scripts = scripts_of(opened.tokenizer)
    own = {opened.tokenizer.eos_id}
    assert ends(ours(opened, scripts), scripts) == ends(theirs(folder, scripts), scripts) | own


def tune(folder, tmp_path, how, **settings):
    talks = make_talks(tmp_path / "talks.jsonl", 20)
    given = arguments(tmp_path, train__steps=1, data__seq_len=128, **settings)
    assert run(["finetune", str(folder), str(talks), "--how", how, *given]) == 0
    return tmp_path / "runs" / "tuned"


def assert_ends_alike(tuned, tmp_path, expected):
    """Of a run, of what it left in its folder, merged, and exported."""
    merged = tmp_path / "merged"
    assert run(["merge", str(tuned), "--out", str(merged)]) == 0
    opened = open_model(str(tuned), device="cpu")
    scripts = scripts_of(opened.tokenizer)
    reference = theirs(merged, scripts)
    assert {opened.tokenizer.backend.id_to_token(i) for i in ends(reference, scripts)} == expected
    for path in (tuned, tuned / "hf", merged):
        assert ours(open_model(str(path), device="cpu"), scripts) == reference, path
    return reference, scripts


def gguf_ends(tuned, path, scripts):
    """Ids that the file names, and those at which llama.cpp's server ends an answer."""
    F16.write(open_to_export(tuned), path)
    fields = gguf.GGUFReader(path).fields
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {int(fields[key].contents()) for key in keys if key in fields}
    command = [sys.executable, "-m", "tests.cli.llama_ends", str(path), *(str(script[2]) for script in scripts)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return named, set(json.loads(answer.stdout.splitlines()[-1]))


SLOW = [name if name == "glm4" else pytest.param(name, marks=pytest.mark.slow) for name in BYTE_LEVEL]


@pytest.mark.parametrize("name", SLOW)
def test_a_tuned_model_ends_where_transformers_ends_it_merged_and_in_llama_cpp_too(name, tmp_path):
    folder = make(tmp_path / "model", name, vocab_size=1000)
    tuned = tune(folder, tmp_path, "lora")
    reference, scripts = assert_ends_alike(tuned, tmp_path, set(FAMILIES[name].stops))
    named, ended = gguf_ends(tuned, tmp_path / "model.gguf", scripts)
    assert named == ends(reference, scripts)
    # By their names llama.cpp ends at some tokens whatever a file says.
    by_name = {"</s>", "<|endoftext|>", "<|im_end|>", "<|eom_id|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"}
    tokenizer = open_model(str(tuned), device="cpu").tokenizer
    others = {i for script in scripts if tokenizer.backend.id_to_token(i := script[2]) in by_name}
    assert named <= ended <= named | others
    (tuned / "chat_template.jinja").unlink()  # as a run on text has it: the template is that of the loaded weights
    opened = open_model(str(tuned), device="cpu")
    assert opened.chat.source == FAMILIES[name].template
    assert opened.chat.tokens["eos_token"] == dict(FAMILIES[name].named)["eos_token"]
    assert ours(opened, scripts) == reference
    recipe = opened.recipe.model_copy(update={"model": opened.recipe.model.model_copy(update={"weights": "random"})})
    assert template_folder(recipe, tuned) is None
    for named in (folder, folder / "tokenizer.json"):
        data = recipe.data.model_copy(update={"tokenizer": str(named)})
        assert template_folder(recipe.model_copy(update={"data": data}), tuned) == folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral"])
def test_a_tuned_model_with_pieces_ends_where_transformers_ends_it(name, tmp_path):
    tuned = tune(make(tmp_path / "model", name, vocab_size=1000), tmp_path, "full")
    assert_ends_alike(tuned, tmp_path, set(FAMILIES[name].stops))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("lora", "llama"),
        pytest.param("full", "llama", marks=pytest.mark.slow),
        pytest.param("full", "qwen3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_a_base_model_was_taught_is_what_its_merged_folder_says(how, kind, tmp_path):
    folder = make(tmp_path / "model", "smollm", kind, vocab_size=1000)
    end, old = ("<|im_end|>", "<|endoftext|>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids([end, old])
    for name in ("chat_template.jinja", "generation_config.json"):
        (folder / name).unlink()
    for name, changes in (
        ("config.json", {"eos_token_id": ids[1]}),
        ("tokenizer_config.json", {"eos_token": old, "bos_token": old}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    tuned = tune(folder, tmp_path, how, data__chat_template="chatml")
    _, scripts = assert_ends_alike(tuned, tmp_path, {end, old})
    merged = tmp_path / "merged"
    for place in (merged, *([tuned / "hf"] if how == "full" else [])):
        said = {name: json.loads((place / f"{name}.json").read_text()) for name in ("config", "generation_config")}
        assert said["config"]["eos_token_id"] == ids[0]
        assert said["generation_config"]["eos_token_id"] == ids
    again = AutoTokenizer.from_pretrained(merged)
    assert (again.eos_token, again.eos_token_id, again.bos_token) == (end, ids[0], old)
    assert AutoTokenizer.from_pretrained(tuned / "hf").eos_token == end
    named, ended = gguf_ends(tuned, tmp_path / "model.gguf", scripts)
    assert named == ended == set(ids)
    text = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes"}]
    assert again.apply_chat_template(text)["input_ids"][-2] == ids[0]
