"""The consumer onnxruntime, on the CPU."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tilewright.compress.onnx.count_matmuls import count_matmuls
from tilewright.compress.prove.consumer_session import Request, serve
from tilewright.compress.prove.graphs.kept_tensors import KeptTensors


class OnnxRuntime(KeptTensors):
    """An ONNX file in onnxruntime."""

    def __init__(self, request: Request):
        super().__init__(request)
        import onnxruntime

        self._session = onnxruntime.InferenceSession(
            request.artefact, self._options(), providers=["CPUExecutionProvider"]
        )
        self._ids, *past = self._session.get_inputs()  # of images their pixels alone
        self._past = [tensor.name for tensor in past]
        self.empty = [np.zeros((1, tensor.shape[1], 0, tensor.shape[3]), np.float32) for tensor in past]
        self.runtime = f"onnxruntime {onnxruntime.__version__}"

    def _options(self):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.request.threads
        options.log_severity_level = 3
        return options

    def run(self, ids_1S: np.ndarray, past: Sequence[Any]) -> tuple[np.ndarray, Sequence[Any]]:
        """Run the model in onnxruntime on some tokens behind a cache: see `KeptTensors.run`."""
        given = {self._ids.name: ids_1S, **dict(zip(self._past, past, strict=True))}
        logits, *kept = cast(list[np.ndarray], self._session.run(None, given))
        return logits, kept

    def image_logits(self, pixels_B3HW: np.ndarray) -> np.ndarray:
        """Logits of images by onnxruntime, in one pass."""
        return cast(list[np.ndarray], self._session.run(None, {self._ids.name: pixels_B3HW}))[0]

    def quantized(self) -> Mapping[str, int] | None:
        """Operators of the graph that onnxruntime made of the file."""
        import onnx
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            options = self._options()
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            onnxruntime.InferenceSession(self.request.artefact, options, providers=["CPUExecutionProvider"])
            return count_matmuls(onnx.load(options.optimized_model_filepath, load_external_data=False))


if __name__ == "__main__":
    serve(OnnxRuntime)
