"""The consumer AOTInductor: a package of compiled code, run by torch without Python in between.

Options: `kept`, (heads, width) of each kept tensor.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewright.compress.prove.consumer_session import Request, serve
from tilewright.compress.prove.graphs.kept_tensors import KeptTensors


class AotiPackage(KeptTensors):
    """A .pt2 file."""

    def __init__(self, request: Request):
        super().__init__(request)
        torch.set_num_threads(request.threads)
        self._model: Any = torch._inductor.aoti_load_package(request.artefact)
        self.empty = [torch.zeros(1, heads, 0, width) for heads, width in request.options["kept"]]
        self.runtime = f"AOTInductor, torch {importlib.metadata.version('torch')}, FP32"

    @torch.inference_mode()
    def run(self, ids_1S: np.ndarray, past: Sequence[Any]) -> tuple[np.ndarray, Sequence[Any]]:
        """Run the AOTInductor package on some tokens behind a cache: see `KeptTensors.run`."""
        logits, *kept = self._model(torch.from_numpy(ids_1S), *past)
        return logits.numpy(), kept


if __name__ == "__main__":
    serve(AotiPackage)
