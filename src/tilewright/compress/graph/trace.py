"""A model traced by torch.export: the one form that ONNX, OpenVINO, ExecuTorch and AOTInductor are made from.

Lengths are free: of the new tokens from 1, of the kept ones from 0, up to `longest` where a runtime plans its
memory. Of images the number is free.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tilewright.compress.graph.decoder import DecoderGraph
from tilewright.compress.graph.hf import HFGraph
from tilewright.compress.graph.images import ImageGraph
from tilewright.core.errors import CheckpointError
from tilewright.models.base.protocols import Model
from tilewright.models.build import spec_of
from tilewright.models.decoder.config import DecoderConfig

IDS, PIXELS, LOGITS = "ids", "pixels", "logits"
Graph = DecoderGraph | HFGraph | ImageGraph
GRAPHS: dict[str, Callable[[Any], nn.Module]] = {"decoder": DecoderGraph, "hf": HFGraph}
"""By architecture, what makes its graph; one of the caller's own brings `ModelSpec.graph`."""


def why_no_graph(model: Model) -> str | None:
    """Why a model cannot be traced as a graph; None where it can be tried. Quick."""
    config = model.config
    if isinstance(config, DecoderConfig) and any(shape.attention == "linear" for shape in config.shapes):
        return "linear attention keeps a state, and graphs keep tensors of all positions"
    spec = spec_of(model.architecture)
    return None if (spec.graph or GRAPHS.get(spec.name)) else f"no graph form for the architecture {spec.name}"


def graph_of(model: Any, image_size: int = 0) -> Any:
    """The graph form of a model to trace, in FP32, in evaluation mode.

    Args:
        model: a `models.base.protocols.Model`.
        image_size: side of the images that it reads; of text 0.

    Raises:
        CheckpointError: its architecture has none.
    """
    spec = spec_of(model.architecture)
    make = partial(ImageGraph, size=image_size) if image_size else spec.graph or GRAPHS.get(spec.name)
    if make is None:
        raise CheckpointError(
            "No graph form for this architecture",
            got=spec.name,
            need="an architecture that makes one (ModelSpec.graph)",
            try_="--to hf, or a model of another architecture",
        )
    graph = make(model)
    return graph.eval().requires_grad_(False)


def input_names(graph: Graph) -> list[str]:
    """Names of a traced graph's inputs, in order: ids or pixels, then what is kept."""
    first = PIXELS if isinstance(graph, ImageGraph) else IDS
    return [first, *(f"past.{name}" for name, _ in graph.kept)]


def output_names(graph: Graph) -> list[str]:
    """Names of a traced graph's outputs, in order: logits, then what is kept."""
    return [LOGITS, *(f"kept.{name}" for name, _ in graph.kept)]


def example(graph: Graph, new: int = 6, past: int = 7) -> tuple[Tensor, ...]:
    """Example inputs to trace with: `new` tokens after `past` ones, or `new` images."""
    if isinstance(graph, ImageGraph):
        return (torch.zeros(new, *graph.shape),)
    kept = [torch.zeros(1, heads, past, width) for _, (heads, _, width) in graph.kept]
    return (torch.arange(new)[None], *kept)


def trace(graph: nn.Module, *, longest: int | None = None) -> ExportedProgram:
    """Trace a graph as an ExportedProgram of free lengths.

    Args:
        graph: of `graph_of`, or a quantised copy of one.
        longest: most tokens, new and kept ones each; None for no limit.

    Raises:
        CheckpointError: the model branches on data or fixes a length, so that no graph holds it.
    """
    new, past = Dim.DYNAMIC, Dim.DYNAMIC
    if longest is not None:
        new, past = Dim.DYNAMIC(min=1, max=longest), Dim.DYNAMIC(min=0, max=longest)
    inputs = example(cast(Graph, graph))
    kept = tuple({2: past} for _ in inputs[1:])
    free = 0 if isinstance(graph, ImageGraph) else 1
    shapes = ({free: new}, kept) if kept else ({free: new},)
    with (
        converting("Model cannot be traced into a graph", need="a model without branches on its data"),
        torch.no_grad(),
    ):
        return torch.export.export(graph, inputs, dynamic_shapes=shapes)


@contextmanager
def converting(what: str, *, need: str, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what a converter of a traced graph raises into an error of the export; OSError, a full disk, passes.

    Args:
        what: the first line of the error.
        need: its third.
        errors: classes of the converter's own, beside the usual ones.

    Raises:
        CheckpointError: the converter gave up.

    Example:
        >>> with converting("Model cannot be lowered", need="known operations"):
        ...     raise KeyError("aten.frobnicate")
        Traceback (most recent call last):
        tilewright.core.errors.CheckpointError: Model cannot be lowered
          got    KeyError: 'aten.frobnicate'
          need   known operations
          try    --to gguf-q8_0, or a model of another architecture
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, *errors) as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise CheckpointError(
            what,
            got=f"{type(error).__name__}: {lines[0][:300]}",
            need=need,
            try_="--to gguf-q8_0, or a model of another architecture",
        ) from error
