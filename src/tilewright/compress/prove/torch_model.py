"""The consumer tilewright itself: the model in this process, in FP32 or BF16, eager or compiled. Eager, it answers one
cached token as `tilewright generate` does (`precision.mixed.few_row_layers`).

It proves folders that a run loads (`fp8`), and it is the baseline of every other row.

Options: `section`, the `[model]` section to build; `vocab_size`; `weights`, a safetensors file of the model's state, or
"" where the artefact is the folder to load; `dtype`; `compile`.
"""

import importlib.metadata
import time
from typing import Any

import numpy as np
import torch

from tilewright.compress.prove.consumer_session import CACHED_AT, ConsumerSession, Request, serve
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.hardware import detect_machine
from tilewright.models.build import build_model
from tilewright.precision.mixed import few_row_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchModel(ConsumerSession):
    """Our model."""

    def __init__(self, request: Request):
        super().__init__(request)
        torch.set_num_threads(request.threads)
        options = request.options
        folder = {} if options["weights"] else {"path": request.artefact}
        section = ModelSection(**options["section"] | folder)
        self.model: Any = build_model(section, options["vocab_size"], device="cpu")
        if options["weights"]:
            from safetensors.torch import load_file

            wrong = self.model.load_state_dict(load_file(options["weights"]), strict=False)
            self._check(wrong.missing_keys, wrong.unexpected_keys)
        self.model = self.model.eval().to(DTYPES[options["dtype"]])
        self.causal = section.task == "causal_lm"
        if options["compile"]:
            self.model.compile_blocks()
        else:
            few_row_layers.attach(self.model, detect_machine("cpu"))
        version = importlib.metadata.version("torch")
        self.runtime = f"torch {version}, {options['dtype'].upper()} {'compiled' if options['compile'] else 'eager'}"

    def _check(self, missing: list[str], unexpected: list[str]) -> None:
        """Check the weights of our torch model in an artefact: tied ones are stored once, under their first name."""
        state = self.model.state_dict(keep_vars=True)
        loaded = {id(tensor) for name, tensor in state.items() if name not in missing}
        lost = [name for name in missing if id(state[name]) not in loaded]
        if lost or unexpected:
            raise ValueError(f"weights of another model: missing {lost}, unexpected {unexpected}")

    @torch.inference_mode()
    def logits(self, ids_S: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
        """Logits of a row at some positions by our torch model, in one pass."""
        return all_logits(self.model, ids_S)[torch.from_numpy(positions_P)].float().numpy()

    @torch.inference_mode()
    def image_logits(self, pixels_B3HW: np.ndarray) -> np.ndarray:
        """Logits of images by our torch model, in one pass."""
        pixels = torch.from_numpy(pixels_B3HW).to(DTYPES[self.request.options["dtype"]])
        return self.model.image_logits(pixels).float().numpy()

    @torch.inference_mode()
    def prefill_s(self, ids_S: np.ndarray) -> float:
        """Time a prefill by our torch model, in seconds: a pass over the row, logits of its last position."""
        ids_BS = torch.from_numpy(ids_S)[None]
        started = time.perf_counter()
        if self.causal:
            self.model.next_token_logits(ids_BS)
        else:
            all_logits(self.model, ids_S)
        return time.perf_counter() - started

    @torch.inference_mode()
    def cached_token_s(self, ids_S: np.ndarray) -> float | None:
        """Time a cached token by our torch model, in seconds: a pass over the last token with the key/value cache."""
        cache = self.model.new_cache(1, CACHED_AT + 1) if self.causal else None
        if cache is None:
            return None
        ids_BS = torch.from_numpy(ids_S)[None]
        self.model.next_token_logits(ids_BS[:, :-1], cache)
        started = time.perf_counter()
        self.model.next_token_logits(ids_BS[:, -1:], cache)
        return time.perf_counter() - started


def all_logits(model: Any, ids_S: np.ndarray) -> torch.Tensor:
    """Logits [S, V] of a row by our torch model."""
    return model.logits(torch.from_numpy(np.ascontiguousarray(ids_S))[None])[0]


if __name__ == "__main__":
    serve(TorchModel)
