"""The consumer llama.cpp: its server, in this process by the wheel `xllamacpp`, asked over loopback as a client would.

A distribution is one request: the ids so far as the prompt, one token to predict, the log-probabilities of all tokens.
What a row has in common with the one before stays in the server's cache, so a request computes what is new.

Options: `normalize`, the Unicode form in which callers give text where the artefact leaves that to them; "" for none.
"""

import importlib.metadata
import json
import unicodedata
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.compress.gguf.read_formats import read_formats
from tilewright.compress.prove.consumer_session import CACHED_AT, ConsumerSession, Request, serve

_ALL = 1 << 24
"""More log-probabilities than any vocabulary has tokens; the server gives all there are."""


class LlamaCpp(ConsumerSession):
    """A GGUF file in llama.cpp's server."""

    def __init__(self, request: Request):
        super().__init__(request)
        import xllamacpp

        library: Any = xllamacpp  # compiled, without annotations
        params = library.CommonParams()
        params.model.path = request.artefact
        params.n_ctx = CACHED_AT + 256
        params.n_parallel = 1
        params.port = 0
        params.ui = False
        params.fit_params = False
        params.verbosity = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request.threads
        self._server = library.Server(params)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.max_length = self._get("/props")["default_generation_settings"]["n_ctx"] - 1
        plain = self._post("/tokenize", {"content": "a", "add_special": False})["tokens"][0]
        # The server tells no log-probabilities where the next token is a part of a character. They are those before the
        # bias, which only makes it continue with a letter.
        self._forced = [[plain, 1e4]]
        self.runtime = f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"

    def logits(self, ids_S: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
        """Log-probabilities by llama.cpp's server; those below the smallest normal FP32 probability are the server's
        lowest number."""
        return np.stack([self._distribution(ids_S[: position + 1]) for position in positions_P])

    def _distribution(self, ids: np.ndarray) -> np.ndarray:
        found = self._complete(ids, n_probs=_ALL, logit_bias=self._forced)["completion_probabilities"][0][
            "top_logprobs"
        ]
        log_probs_V = np.full(max(entry["id"] for entry in found) + 1, -np.inf, np.float32)
        for entry in found:
            log_probs_V[entry["id"]] = entry["logprob"]
        return log_probs_V

    def token_ids(self, texts: Sequence[str], special: bool = False) -> list[list[int]] | None:
        """Token ids by the tokenizer of llama.cpp's server; special tokens in a text are text."""
        asked = {"add_special": special, "parse_special": False}
        form = self.request.options.get("normalize", "")
        given = [unicodedata.normalize(form, text) if form else text for text in texts]
        return [self._post("/tokenize", {"content": text, **asked})["tokens"] for text in given]

    def facts(self) -> Mapping[str, Any]:
        """Facts by llama.cpp: the length that the model was trained for, and the template that the server renders
        with."""
        models = self._get("/v1/models")["data"]
        positions = models[0]["meta"]["n_ctx_train"]
        return {"positions": positions, "chat_template": self._get("/props").get("chat_template")}

    def prefill_s(self, ids_S: np.ndarray) -> float:
        """Seconds of a prefill by llama.cpp: the server's own measure of the prompt."""
        return self._complete(ids_S, cache_prompt=False)["timings"]["prompt_ms"] / 1000

    def cached_token_s(self, ids_S: np.ndarray) -> float | None:
        """Seconds of a cached token by llama.cpp: the server's measure of a prompt of which all but one token are
        cached."""
        timings = self._complete(ids_S)["timings"]
        if timings["prompt_n"] != 1:  # the first time nothing was cached
            timings = self._complete(ids_S)["timings"]
        return timings["prompt_ms"] / 1000 if timings["prompt_n"] == 1 else None

    def quantized(self) -> Mapping[str, int] | None:
        """Tensors of llama.cpp's file by format, as its header has them: each multiplies in its own."""
        return read_formats(Path(self.request.artefact))

    def _complete(self, ids: np.ndarray, **options: Any) -> dict[str, Any]:
        prompt = {"prompt": [int(i) for i in ids], "n_predict": 1, "temperature": 0.0, "cache_prompt": True}
        return self._post("/completion", prompt | options)

    def _get(self, path: str) -> dict[str, Any]:
        with self._opener.open(self._server.listening_address + path) as answer:
            return json.load(answer)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._server.listening_address + path, json.dumps(body).encode(), headers)
        with self._opener.open(request) as answer:
            return json.load(answer)


if __name__ == "__main__":
    serve(LlamaCpp)
