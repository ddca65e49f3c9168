"""The consumer transformers: a Hugging Face folder, loaded as its config.json says and run eagerly.

Options: `task`; `auto`, the class of transformers that loads it.
"""

import importlib
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.compress.prove.consumer_session import ConsumerSession, Request, serve
from tilewright.models.hf.cache import cache_name


class TransformersFolder(ConsumerSession):
    """A model of transformers, and a tokenizer where it reads text."""

    def __init__(self, request: Request):
        super().__init__(request)
        transformers = importlib.import_module("transformers")
        torch.set_num_threads(request.threads)
        task = request.options["task"]
        self.causal = task == "causal_lm"
        auto = getattr(transformers, request.options["auto"])
        self.net = auto.from_pretrained(
            request.artefact, dtype="auto", trust_remote_code=False, local_files_only=True, use_safetensors=True
        ).eval()
        self.tokenizer: Any = None
        if task != "image_classification":
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                request.artefact, trust_remote_code=False, local_files_only=True
            )
        dtype = str(self.net.dtype).removeprefix("torch.")
        self.runtime = f"transformers {importlib.metadata.version('transformers')}, {dtype}"

    @torch.inference_mode()
    def logits(self, ids_S: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
        """Logits of a row at some positions by transformers, in one pass."""
        return self._run(ids_S).logits[0, torch.from_numpy(positions_P)].float().numpy()

    @torch.inference_mode()
    def image_logits(self, pixels_B3HW: np.ndarray) -> np.ndarray:
        """Logits of images by transformers, in one pass."""
        return self.net(pixel_values=torch.from_numpy(pixels_B3HW).to(self.net.dtype)).logits.float().numpy()

    def token_ids(self, texts: Sequence[str], special: bool = False) -> list[list[int]] | None:
        """Token ids by transformers' AutoTokenizer; special tokens in a text are text."""
        return self.tokenizer(list(texts), add_special_tokens=special, split_special_tokens=True)["input_ids"]

    def facts(self) -> Mapping[str, Any]:
        """Facts that transformers reads from the exported folder: positions by config.json, and the template that
        `apply_chat_template` renders with."""
        positions = getattr(self.net.config, "max_position_embeddings", None)
        known = {"positions": positions} if positions is not None else {}
        return {**known, "chat_template": self.tokenizer.chat_template}

    @torch.inference_mode()
    def prefill_s(self, ids_S: np.ndarray) -> float:
        """Time a prefill by transformers, in seconds: a pass over the row, logits of its last position if it is
        causal."""
        last = {"logits_to_keep": 1} if self.causal else {}
        started = time.perf_counter()
        self._run(ids_S, **last)
        return time.perf_counter() - started

    @torch.inference_mode()
    def cached_token_s(self, ids_S: np.ndarray) -> float | None:
        """Time a cached token by transformers, in seconds: a pass over the last token with the key/value cache of the
        others."""
        if not self.causal:
            return None
        name = cache_name(self.net)
        if name is None:
            return None
        past = {name: getattr(self._run(ids_S[:-1], use_cache=True), name)}
        started = time.perf_counter()
        self._run(ids_S[-1:], use_cache=True, **past)
        return time.perf_counter() - started

    def _run(self, ids_S: np.ndarray, **options: object):
        return self.net(input_ids=torch.from_numpy(np.ascontiguousarray(ids_S))[None], **options)


if __name__ == "__main__":
    serve(TransformersFolder)
