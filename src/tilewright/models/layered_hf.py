"""Foreign models, layer by layer."""

from tilewright.models.contract import Model
from tilewright.models.decoder import Decoder
from tilewright.models.layered import Layered, Whole


def layered(model: Model) -> Layered:
    """The model as a row of layers; kept whole where it cannot be cut."""
    return model if isinstance(model, Decoder) else Whole(model)
