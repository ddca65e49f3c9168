"""Published speeds of links between GPUs, and what communication is guessed to reach of them.

Rates are the makers' own, one direction of one GPU, and no measurement of ours. `intra` joins the GPUs of a node,
`inter` is a GPU's own adapter to the network. Used for `plan --world`; `--link` gives others.
"""

import difflib
from dataclasses import dataclass

from tilewright.core.errors import ConfigError

LINK_REACH = 0.8
"""Of a published rate, what collectives reach (guess; NCCL's own tests show 0.75 to 0.9 for large messages)."""
LINK_GUESS = f"guessed: collectives reach {LINK_REACH:.0%} of a link's published rate"


@dataclass(frozen=True)
class LinkSpec:
    """The speeds of a link between GPUs, as its maker publishes them.

    `rate`: bytes/s in one direction. `latency_s`: of a message (guess).
    """

    name: str
    rate: float
    latency_s: float
    source: str


LINKS = {
    one.name: one
    for one in (
        LinkSpec("nvlink3", 300e9, 5e-6, "NVIDIA A100 data sheet: NVLink 600 GB/s, both directions"),
        LinkSpec("nvlink4", 450e9, 5e-6, "NVIDIA H100 data sheet: NVLink 900 GB/s, both directions"),
        LinkSpec("nvlink4-h800", 200e9, 5e-6, "DeepSeek-V3, arXiv 2412.19437, 3.2.2: H800, NVLink 160 GB/s reached"),
        LinkSpec("nvlink5", 900e9, 5e-6, "NVIDIA B200 data sheet: NVLink 1.8 TB/s, both directions"),
        LinkSpec("pcie4", 31.5e9, 10e-6, "PCI Express 4.0 x16: 16 GT/s, 128b/130b"),
        LinkSpec("pcie5", 63e9, 10e-6, "PCI Express 5.0 x16: 32 GT/s, 128b/130b"),
        LinkSpec("infiniband-200", 25e9, 10e-6, "InfiniBand HDR, 200 Gb/s (DGX A100: one adapter per GPU)"),
        LinkSpec("infiniband-400", 50e9, 10e-6, "InfiniBand NDR, 400 Gb/s (DGX H100: one adapter per GPU)"),
        LinkSpec("ethernet-10", 1.25e9, 50e-6, "10 Gb/s Ethernet"),
        LinkSpec("ethernet-100", 12.5e9, 30e-6, "100 Gb/s Ethernet"),
        LinkSpec("ethernet-400", 50e9, 20e-6, "400 Gb/s Ethernet"),
    )
}
_OF_GPU = {
    "h100": ("nvlink4", "infiniband-400"),
    "h200": ("nvlink4", "infiniband-400"),
    "b200": ("nvlink5", "infiniband-400"),
    "a100": ("nvlink3", "infiniband-200"),
    "4090": ("pcie4", "ethernet-10"),
}
"""Inside a node and out of it, by the names of `gpu_specs`."""


def links_of(gpu: str) -> tuple[LinkSpec, LinkSpec]:
    """The published links inside a node and out of it, as machines with this GPU are sold.

    Example:
        >>> [one.name for one in links_of("h100")]
        ['nvlink4', 'infiniband-400']
    """
    intra, inter = _OF_GPU[gpu]
    return LINKS[intra], LINKS[inter]


def find_link(name: str, place: str = "inter") -> LinkSpec:
    """Find a link between GPUs by its name.

    Args:
        name: of the table.
        place: `inter` or `intra` a node, for the option in an error.

    Raises:
        ConfigError: not in the table.
    """
    if name not in LINKS:
        near = difflib.get_close_matches(name, LINKS, n=1) or ["infiniband-400"]
        raise ConfigError(
            "Unknown link",
            got=name,
            need=f"a rate such as 50GB/s, or one of {', '.join(LINKS)}",
            try_=f"--link {place}={near[0]}",
            where="--link",
        )
    return LINKS[name]
