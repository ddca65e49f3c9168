"""Target `aoti`: the model compiled ahead of time by AOTInductor into one .pt2 file, in FP32, for this processor.

Inputs and outputs are those of `onnx`.
"""

import shutil
from pathlib import Path

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.trace import converting, graph_of, trace, why_no_graph


def _why_not(source: ExportSource) -> str | None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "AOTInductor compiles C++, and neither g++ nor clang++ is there"
    return why_no_graph(source.model)


def _write(source: ExportSource, path: Path) -> Written:
    import torch

    graph = graph_of(source.model)
    between = path.with_name(f"{path.name}.pt2")  # it takes no other ending
    traced = trace(graph)
    with converting("Model cannot be compiled ahead of time", need="operations that inductor compiles, and a compiler"):
        torch._inductor.aoti_compile_and_package(traced, package_path=str(between))
    between.rename(path)
    notes = ["for processors with this one's instructions"]
    if not graph.kept:
        notes.append("whole rows only: the model keeps no keys and values")
    kept = [[heads, width] for _, (heads, _, width) in graph.kept]
    return Written(notes=notes, options={"kept": kept}, stored=lambda: source.model)


AOTI = Target(
    name="aoti",
    use="serving",
    file="{run}.pt2",
    write=_write,
    why_not=_why_not,
    consumer=Consumer("AOTInductor", "tilewright.compress.prove.graphs.aoti_package"),
)
