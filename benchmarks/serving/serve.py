"""`tilewright serve` under load: eight clients of the `openai` package, malformed requests between good ones.

A model of 5 million parameters with random weights is served by a process of its own, as a user starts it. Eight
threads send 200 requests, half of them streamed, and 50 that are wrong in ten ways. Counted: answers that are lost or
of another length than asked for, wrong requests that do not get a status 4xx, and the memory of the server.

    python -m benchmarks.serving.serve
"""

import http.client
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil

from benchmarks.common import parser_of, write_result
from tilewright.data.chat.load import CHATML
from tilewright.data.common.tokenizer import train_tokenizer
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder

CLIENTS, GOOD, BAD, TOKENS = 8, 200, 50, 16
MARKS = (50, 150, 250)
"""Requests after which the server's memory is read."""
NAME = "served"
_RIGHT = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
_WRONG: list[Any] = [
    b"{",
    b"\xff\xfe",
    b'{"model": "served", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    _RIGHT | {"messages": []},
    _RIGHT | {"messages": [{"role": "wizard", "content": "x"}]},
    _RIGHT | {"model": "other"},
    _RIGHT | {"n": 999},
    _RIGHT | {"max_tokens": "many"},
    _RIGHT | {"messages": [{"role": "user", "content": "hello " * 20000}]},
    b" " * 2_000_000,
]


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / NAME
        num_params = _make_model(folder)
        command = [sys.executable, "-m", "tilewright", "serve", str(folder), "--port", "0", "--concurrent", "8"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split(",")[0].strip()
            results = _load(address, psutil.Process(server.pid))
        finally:
            server.terminate()
            code = server.wait(30)
    results |= {"parameters": num_params, "clients": CLIENTS, "exit_code_after_sigterm": code}
    claim = "8 clients, 200 requests and 50 malformed ones: none lost, every malformed one 4xx"
    write_result("serve", claim, results)
    print(json.dumps({key: value for key, value in results.items() if key != "seconds"}, indent=1))


def _make_model(folder: Path) -> int:
    texts = [path.read_text() for path in sorted(Path("docs").rglob("*.md"))]
    tokenizer = train_tokenizer(texts, 8000)
    model = Decoder(DecoderConfig.of(vocab_size=tokenizer.vocab_size, dim=256, num_heads=4, num_layers=4))
    init_weights(model, 0)
    model.save_hf(folder, extra={"max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_id})
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return sum(param.numel() for param in model.parameters())


def _load(address: str, process: psutil.Process) -> dict[str, Any]:
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=300)
    every = GOOD // BAD + 1
    jobs = [("bad" if i % every == every - 1 else "good", i) for i in range(GOOD + BAD)]
    lock, done, memory, problems, wrong = threading.Lock(), itertools.count(1), {}, [], []
    seconds, first_seconds, tokens = [], [], []

    def one(job: tuple[str, int]) -> None:
        kind, i = job
        try:
            if kind == "bad":
                status = _post(address, _WRONG[i // every % len(_WRONG)])
                if not 400 <= status < 500:
                    wrong.append(status)
            else:
                begun = time.perf_counter()
                first, count = _ask(client, i)
                seconds.append(time.perf_counter() - begun)
                first_seconds.extend([] if first is None else [first])
                tokens.append(count)
        except (openai.OpenAIError, OSError, http.client.HTTPException, AssertionError) as error:
            problems.append(f"{kind} {i}: {error!r}")
        with lock:
            if (number := next(done)) in MARKS:
                memory[str(number)] = process.memory_info().rss / 2**20

    memory["start"] = process.memory_info().rss / 2**20
    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, jobs))
    wall = time.perf_counter() - begun
    return {
        "good": GOOD,
        "answered": len(seconds),
        "lost": problems,
        "malformed": BAD,
        "malformed_not_4xx": wrong,
        "server_mib": {mark: round(value, 1) for mark, value in memory.items()},
        "tokens_per_s": sum(tokens) / wall,
        "wall_s": wall,
        "latency_s": _quantiles(seconds),
        "first_token_s": _quantiles(first_seconds),
    }


def _ask(client: openai.OpenAI, i: int) -> tuple[float | None, int]:
    """Seconds to the first token of a streamed answer, and its tokens; those of one text are checked by its seed."""
    messages: Any = [{"role": "user", "content": f"How does layer-major execution work, question {i % 20}?"}]
    options: Any = {"model": NAME, "messages": messages, "max_tokens": TOKENS, "seed": i % 20}
    if i % 2:
        whole = client.chat.completions.create(**options)
        assert whole.usage is not None
        assert whole.choices[0].finish_reason in ("stop", "length")
        return None, whole.usage.completion_tokens
    begun, first, count, reason = time.perf_counter(), None, 0, None
    for part in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        if part.choices:
            reason = part.choices[0].finish_reason or reason
            if first is None and part.choices[0].delta.content:
                first = time.perf_counter() - begun
        elif part.usage is not None:
            count = part.usage.completion_tokens
    assert reason in ("stop", "length")
    return first, count


def _post(address: str, body: Any) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    host = urlsplit(address)
    connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=60)
    connection.request("POST", f"{host.path}/chat/completions", content, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert set(json.loads(answer.read())["error"]) == {"message", "type", "param", "code"}
    connection.close()
    return answer.status


def _quantiles(samples: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(samples)}


if __name__ == "__main__":
    main()
