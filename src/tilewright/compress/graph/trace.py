"""A model traced by torch.export: the one form that ONNX, OpenVINO, ExecuTorch and AOTInductor are made from.

Lengths are free: of the new tokens from 1, of the kept ones from 0, up to `longest` where a runtime plans its
memory.
"""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tilewright.compress.graph.decoder import DecoderGraph
from tilewright.compress.graph.hf import HFGraph
from tilewright.core.errors import CheckpointError
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.model import HFModel

IDS, LOGITS = "ids", "logits"


def why_no_graph(model: object, task: str) -> str | None:
    """Why a model cannot become a graph; None where tracing it can be tried. Quick."""
    if task == "image_classification":
        return "graphs are written for models that read token ids, not images"
    if not isinstance(model, (Decoder, HFModel)):
        return f"no graph form for {type(model).__name__}"
    return None


def graph_of(model: Decoder | HFModel) -> DecoderGraph | HFGraph:
    """The graph form of a model in FP32, in evaluation mode."""
    graph = DecoderGraph(model) if isinstance(model, Decoder) else HFGraph(model)
    return graph.eval().requires_grad_(False)


def input_names(graph: DecoderGraph | HFGraph) -> list[str]:
    """Names of the inputs, in order: ids, then what is kept."""
    return [IDS, *(f"past.{name}" for name, _ in graph.kept)]


def output_names(graph: DecoderGraph | HFGraph) -> list[str]:
    """Names of the outputs, in order: logits, then what is kept."""
    return [LOGITS, *(f"kept.{name}" for name, _ in graph.kept)]


def example(graph: DecoderGraph | HFGraph, new: int = 6, past: int = 7) -> tuple[Tensor, ...]:
    """Inputs of `new` tokens after `past` ones."""
    kept = [torch.zeros(1, heads, past, width) for _, (heads, _, width) in graph.kept]
    return (torch.arange(new)[None], *kept)


def trace(graph: nn.Module, *, longest: int | None = None) -> ExportedProgram:
    """The graph as an ExportedProgram of free lengths.

    Args:
        graph: of `graph_of`, or a quantised copy of one.
        longest: most tokens, new and kept ones each; None for no limit.

    Raises:
        CheckpointError: the model branches on data or fixes a length, so that no graph holds it.
    """
    new, past = Dim.DYNAMIC, Dim.DYNAMIC
    if longest is not None:
        new, past = Dim.DYNAMIC(min=1, max=longest), Dim.DYNAMIC(min=0, max=longest)
    inputs = example(graph)
    kept = tuple({2: past} for _ in inputs[1:])
    shapes = ({1: new}, kept) if kept else ({1: new},)
    try:
        with torch.no_grad():
            return torch.export.export(graph, inputs, dynamic_shapes=shapes)
    except (RuntimeError, ValueError, TypeError, AttributeError, torch._dynamo.exc.TorchDynamoException) as error:
        raise CheckpointError(
            "Model cannot be traced into a graph",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}",
            need="a model without branches on its data",
            try_="--to gguf-q8_0, or a model of another architecture",
        ) from error
