"""The consumer ExecuTorch with XNNPACK, on the CPU.

Options: `kept`, (heads, width) of each kept tensor; `longest`, most tokens of a row.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewright.compress.prove.consumer_session import CACHED_AT, Request, serve
from tilewright.compress.prove.graphs.kept_tensors import KeptTensors


class ExecuTorch(KeptTensors):
    """A program in ExecuTorch. It is loaded from its file: one loaded from bytes that are let go crashes."""

    def __init__(self, request: Request):
        super().__init__(request)
        torch.set_num_threads(request.threads)
        from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

        self._program = Runtime.get().load_program(request.artefact)
        self._method: Any = self._program.load_method("forward")
        self.empty = [torch.zeros(1, heads, 0, width) for heads, width in request.options["kept"]]
        self.max_length = min(CACHED_AT + 1, request.options["longest"])
        self.runtime = f"ExecuTorch {importlib.metadata.version('executorch')} (XNNPACK)"

    def run(self, ids_1S: np.ndarray, past: Sequence[Any]) -> tuple[np.ndarray, Sequence[Any]]:
        """Run the ExecuTorch program on some tokens behind a cache: see `KeptTensors.run`. Outputs lie in the program's
        own memory, so what is kept is copied."""
        logits, *kept = self._method.execute([torch.from_numpy(ids_1S), *past])
        return logits.numpy(), [tensor.clone() for tensor in kept]


if __name__ == "__main__":
    serve(ExecuTorch)
