"""The questions that tilewright asks of an architecture, in one object.

`models.build.ARCHITECTURES` is the tuple of those that recipes name in `model.kind`. One of the caller's own is such an
object in the place of the name: see `build.decoder_like` and `build.with_architecture`.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import CheckpointError
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.models.decoder import activation_bytes
from tilewright.models.decoder import flops as costs
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.layerwise.layer_view import LayerwiseModel
from tilewright.ops.kernels import Kernels


@dataclass(frozen=True)
class Formulas:
    """The cost of a layer of a decoder, from its shape alone; that of a `Block` with SwiGLU where nothing is said.

    Each takes the shape and the number of a layer first; `flops` the shape and the length of rows.
    """

    kind: Callable[[DecoderConfig, int], Hashable] = DecoderConfig.is_moe
    """What layers that cost the same have in common: a plan looks at the first of each kind."""
    parameters: Callable[[DecoderConfig, int], int] = costs.layer_parameters
    """All of a layer: checked against its modules when a plan is made."""
    mlp_weights: Callable[[DecoderConfig, int], int] = costs.mlp_weights
    """Of its token-wise part, all experts and the router included."""
    flops: Callable[[DecoderConfig, int], costs.FlopCount] = costs.count_flops
    layer_bytes: Callable[..., int] = activation_bytes.layer_bytes
    """Kept for backward per token; see `activation_bytes.layer_bytes`, and so the next two."""
    tile_bytes: Callable[..., int] = activation_bytes.tile_bytes
    weight_copy_bytes: Callable[..., int] = activation_bytes.weight_copy_bytes
    work_per_token: Callable[[DecoderConfig, int, int], float] = activation_bytes.work_per_token
    """Needed in backward beyond what is kept."""
    width: Callable[[DecoderConfig, int], int] = costs.hidden_width
    """Of the widest hidden layer: its matrix with the stream is the largest weight."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The answers of one architecture. Functions get what their names say; the module docstrings have the rest."""

    name: str
    """In `model.kind`, and in run.toml."""
    build: Callable[["ModelSpec", ModelSection, int, Kernels, torch.device | str], Model]
    """The model of a section, for so many tokens (or classes), on a device: shapes only on "meta"."""
    init: Callable[[Any, int], None]
    """First values, a function of the seed and the names."""
    random_values: Callable[[Any, int], InitialValues]
    """The same in pieces, of a model without memory."""
    stored_values: Callable[[Any, Path | str], InitialValues]
    """Those of a folder, in pieces."""
    layered: Callable[[Any], LayerwiseModel]
    """The model as a row of layers."""
    meta_model: Callable[..., Model] | None = None
    """The model of (config, kernels, task), on the meta device; where it has formulas a fourth argument picks layers
    by their numbers: a plan takes one of each kind. None: a run whose ranks hold other layers has no export."""
    block: Callable[..., nn.Module] | None = None
    """Of a decoder: a layer from shape, number and kernels."""
    formulas: Formulas | None = field(default_factory=Formulas)
    """None: a plan measures the model instead, by running it on tensors without data."""
    read_config: Callable[[Path | str], DecoderConfig] | None = None
    """The shape from a folder's config.json; None: no folder can be loaded."""
    write_config: Callable[[Any, str], Mapping[str, Any]] | None = None
    """config.json from the model's config and the dtype's name; None: no folder is written. Its `model_type` is what
    llama.cpp's names are looked up by."""
    graph: Callable[[Any], nn.Module] | None = None
    """The exported graph, of the interface of `compress.graph.decoder.DecoderGraph`; None: that of the name in
    `compress.graph.trace.GRAPHS`, or none."""

    def folder_config(self, config: Any, dtype_name: str) -> dict[str, Any]:
        """Make the config.json of an architecture's folder.

        Raises:
            CheckpointError: no layout of a folder holds the architecture, or this shape of it.
        """
        if self.write_config is None:
            raise CheckpointError(
                "No Hugging Face layout for this architecture",
                got=self.name,
                need="an architecture that writes a config.json (ModelSpec.write_config)",
                try_="keep tilewright's own checkpoint (checkpoint.export_hf = false)",
                where="checkpoint.export_hf",
            )
        return dict(self.write_config(config, dtype_name))

    def read_folder(self, folder: Path | str) -> DecoderConfig:
        """Read the shape of a model from its folder.

        Raises:
            CheckpointError: it is no folder of this architecture.
        """
        if self.read_config is None:
            raise CheckpointError(
                "Folders of this architecture are not read",
                got=f"{folder}, for {self.name}",
                need="an architecture that reads a config.json (ModelSpec.read_config)",
                try_='model.path = "", or another model.kind',
                where="model.path",
            )
        return self.read_config(folder)
