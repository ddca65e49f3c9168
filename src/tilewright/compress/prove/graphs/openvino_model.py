"""The consumer OpenVINO, on the CPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.compress.prove.consumer_session import Request, serve
from tilewright.compress.prove.graphs.kept_tensors import KeptTensors


class OpenVino(KeptTensors):
    """A folder with model.xml in OpenVINO."""

    def __init__(self, request: Request):
        super().__init__(request)
        import openvino  # pyright: ignore[reportMissingImports]

        options = {
            "INFERENCE_NUM_THREADS": request.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._model = openvino.Core().compile_model(Path(request.artefact) / "model.xml", "CPU", options)
        self._call = self._model.create_infer_request()
        shapes = [tensor.get_partial_shape() for tensor in self._model.inputs[1:]]
        self.empty = [np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32) for shape in shapes]
        self.runtime = f"OpenVINO {openvino.__version__.split('-')[0]}"

    def run(self, ids_1S: np.ndarray, past: Sequence[Any]) -> tuple[np.ndarray, Sequence[Any]]:
        """Run the OpenVINO model on some tokens behind a cache: see `KeptTensors.run`."""
        found = self._call.infer([ids_1S, *past], share_inputs=True)
        logits, *kept = (found[output] for output in self._model.outputs)
        return logits, kept

    def quantized(self) -> Mapping[str, int] | None:
        """Layers of the OpenVINO model with weights, by the precision that it chose for them."""
        facts = [op.get_rt_info() for op in self._model.get_runtime_model().get_ops()]
        layers = [fact for fact in facts if str(fact["layerType"].astype(str)) in ("FullyConnected", "MatMul")]
        return dict(Counter(str(fact["runtimePrecision"].astype(str)) for fact in layers))


if __name__ == "__main__":
    serve(OpenVino)
