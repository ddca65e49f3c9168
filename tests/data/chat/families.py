"""Model folders with a tiny tokenizer and the chat layout of a published family.

The templates are written down here from the families' documented layouts (text, roles, tools where a family has them);
what they have in common with the published files is what they render. The tokenizers are trained on a few words and
have the family's control tokens with the same flags.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = ["hello you are a system that answers questions about the weather in Paris. Yes, no, 42!\n"] * 40


@dataclass(frozen=True)
class Family:
    """A template, its control tokens (special, and added without that flag), and the names that it uses."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    metaspace: bool = False
    """Pieces with the mark of a word's beginning, as SentencePiece makes them."""
    system: bool = True
    """Keeps a system message in a conversation that has been answered."""
    stops: tuple[str, ...] = ()
    """Tokens at which the published generation_config.json stops; none: there is no such file."""


_LLAMA3 = """\
{%- for message in messages %}
    {%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
    {%- if loop.index0 == 0 %}{{- bos_token }}{%- endif %}
    {{- text + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

_DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

_CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content if message.content is string else message.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_PHI3 = """\
{% for message in messages %}{% if message['role'] in ('system', 'user', 'assistant') %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

_GLM4 = """\
[gMASK]<sop>
{%- for item in messages %}
    {%- if item['role'] == 'tool' %}{{- '<|observation|>\\n' + item['content'] }}
    {%- elif item.tool_calls %}
        {%- set call = item.tool_calls[0].function %}
        {{- '<|assistant|>' + call.name + '\\n' + call.arguments | tojson }}
    {%- else %}{{- '<|' + item['role'] + '|>\\n' + item['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

_ZEPHYR = """\
{% for message in messages %}
{% if message['role'] in ('system', 'user', 'assistant') %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DS = (("bos_token", "<｜begin▁of▁sentence｜>"), ("eos_token", "<｜end▁of▁sentence｜>"))
_SP = (("bos_token", "<s>"), ("eos_token", "</s>"))

FAMILIES = {
    "llama3": Family(
        _LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        named=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
    ),
    "llama31": Family(
        _LLAMA31,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        named=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "phi3": Family(
        _PHI3,
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        named=(("bos_token", "<s>"), ("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")),
        stops=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "glm4": Family(
        _GLM4,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        named=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")),
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "zephyr": Family(_ZEPHYR, ("<unk>", "<s>", "</s>"), named=_SP, stops=("</s>",)),
    "smollm": Family(
        _CHATML, _IM, named=(("bos_token", "<|im_start|>"), ("eos_token", "<|im_end|>")), stops=("<|im_end|>",)
    ),
    "qwen3": Family(
        _QWEN3,
        _IM,
        _QWEN_ADDED,
        (("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")),
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "mistral": Family(
        _MISTRAL,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        (),
        _SP,
        metaspace=True,
        system=False,
        stops=("</s>",),
    ),
    "mistral_first": Family(  # the older layout: the system message is in the first user message
        _MISTRAL.replace("loop.last and", "loop.first and"),
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        (),
        _SP,
        metaspace=True,
    ),
    "gemma": Family(
        _GEMMA,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        named=(("bos_token", "<bos>"), ("eos_token", "<eos>")),
        system=False,
        stops=("<eos>", "<end_of_turn>"),
    ),
    "deepseek": Family(_DEEPSEEK, tuple(t for _, t in _DS), ("<｜User｜>", "<｜Assistant｜>"), _DS),
    "deepseek_r1": Family(
        _DEEPSEEK.replace("{{- '<｜Assistant｜>' }}", "{{- '<｜Assistant｜><think>\\n' }}"),
        tuple(t for _, t in _DS),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        _DS,
    ),
    "deepseek_calls": Family(  # arguments are JSON text; thoughts are left out, and texts beside calls
        _DEEPSEEK.replace(
            "{%- set content = message['content'] %}",
            "{%- set content = message['content'] %}{%- if message['tool_calls'] %}{%- set ns.calls = '' %}"
            "{%- for call in message['tool_calls'] %}{%- set ns.calls = ns.calls + '<｜tool▁call▁begin｜>' "
            "+ call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' %}{%- endfor %}"
            "{%- set content = ns.calls %}{%- endif %}",
        ).replace(
            "{%- if message['role'] == 'assistant' %}",
            "{%- if message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] }}{%- endif %}\n"
            "    {%- if message['role'] == 'assistant' %}",
        ),
        tuple(t for _, t in _DS),
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁output▁begin｜>"),
        _DS,
    ),
    "chatml": Family(_CHATML, _IM, named=(("eos_token", "<|im_end|>"),)),
    "marked": Family(_MARKED, _IM, named=(("eos_token", "<|im_end|>"),)),
}


def make_folder(folder: Path, name: str, template: bool = True) -> Path:
    """Write tokenizer.json, tokenizer_config.json and the template of a family."""
    family = FAMILIES[name]
    backend = Tokenizer(models.BPE(byte_fallback=family.metaspace, unk_token="<unk>" if family.metaspace else None))
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if family.metaspace else []
    if family.metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        alphabet = []
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[*family.special, *bytes_],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    if bytes_:  # those are no special tokens but pieces of the vocabulary
        state = json.loads(backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
        backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(family.named)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if family.stops:
        ids = [backend.token_to_id(token) for token in family.stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    return folder
