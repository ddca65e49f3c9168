"""Published runs of large models on GPUs beside steps that the search over meshes gives their settings.

One share of all rates is calibrated on one run (Llama 3.1 8B on 8 GPUs, BF16 and compiled), and held for the others:
of each, tokens per second and GPU, and GiB where they are published. Nothing is measured here. What a simulated step
lacks of a run, and what is not published of it, is in the table.

python -m benchmarks.plans.published_meshes
"""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import parser_of, write_result
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import STEP_PHASES, Activations
from tilewright.models.decoder.activation_bytes import role
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.planner.machine.gpu_specs import GIB, HOST_BYTES, GpuSpec, find_published
from tilewright.planner.simulate.mesh.cluster import cluster_of
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_search import MeshSearch, MeshStep
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import MeshCosts, MeshRates

ONE = Pipeline(1)
CLAIM = (
    "simulated, not measured: steps of published runs, with one share of the GPUs' rates calibrated on one of them; "
    "how far the others are off, and why"
)
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, tables 1 and 3.1: 180K H800 hours per trillion tokens, 2,048 GPUs"
H100 = replace(find_published("h100"), bandwidth=2.4e12, memory=95.0 * GIB)
"""As the runs of torchtitan had it: HBM2e, 500 W."""
LLAMA = {
    "model.tie_embeddings": "false", "model.num_kv_heads": "8", "model.rope_theta": "5e5", "data.vocab_size": "128256",
    "data.seq_len": "8192", "precision.mode": "bf16_mixed", "optim.kind": "adamw", "optim.moments": "fp32",
    "train.compile": "on",
}  # fmt: skip
L8B = LLAMA | {"model.dim": "4096", "model.num_layers": "32", "model.num_heads": "32", "model.ffn_dim": "14336"}
L70B = LLAMA | {"model.dim": "8192", "model.num_layers": "80", "model.num_heads": "64", "model.ffn_dim": "28672"}
L405B = LLAMA | {"model.dim": "16384", "model.num_layers": "126", "model.num_heads": "128", "model.ffn_dim": "53248"}
FP8 = {"precision.mode": "fp8_tile"}
WHOLE = {"parallel.reshard_after_forward": "false"}
"""Parameters of stages stay put together, in torchtitan and with ZeRO-1."""
PP8 = MeshSizes(pp=8, dp_shard=8, tp=8)
DEFAULT = "the number of micro-batches is not published: torchtitan's default then, which is the number of stages"
DROPPED = ("k_proj", "o_proj", "up_proj")
"""Every second matmul of a layer, in the order in which that code runs them (wq, wk, wv, wo, w1, w3, w2)."""
LOGIT_BYTES = {"whole": 12, "cut": 16}
"""Of a logit, most of what torch's own operations have of it at once, in backward: log-softmax, the gradient of it and
that of its input; where ranks hold parts of the vocabulary (`loss_parallel`), a sum more."""
ASYNC = "async TP there hides exchanges of cut matrices behind matmuls"
TILES = "float8 there has a scale per tensor, here per tile"


@dataclass(frozen=True)
class PublishedRun:
    """A run and what was published of it."""

    settings: dict[str, str]
    sizes: MeshSizes
    rows: int
    """Of a micro-batch."""
    count: int
    tokens_per_s: float
    """Per GPU."""
    gib: float = 0.0
    pipeline: Pipeline = ONE
    activations: Activations = "selective"
    recipe: str = "default"
    gpu: GpuSpec = H100
    links: tuple[str, ...] = ()
    source: str = TITAN
    lacks: str = ""

    def step(self, share: float) -> MeshStep:
        """Simulated, where GPUs reach so much of the rates that are guessed of them."""
        batch = self.sizes.data * self.rows * self.count
        given = self.settings | {"train.global_batch_size": str(batch)}
        recipe = load_recipe(self.recipe, given, environ={}).recipe
        machine = self.gpu.machine(detect_machine("cpu"), HOST_BYTES)
        model = MeshModel(recipe, recipe.data.vocab_size, machine, self.gpu.ceilings().slowed(share))
        rates = MeshRates(model, cluster_of("h100", self.sizes.world, "", self.links))
        space = Space.of(model, self.sizes.world, 8)
        search = MeshSearch(rates, space, self.gpu.memory, self.gpu.bf16)
        kind, moments, master = self.activations, recipe.optim.moments, recipe.optim.master_weights
        setting = MeshSetting(self.sizes, self.pipeline, self.rows, self.count, kind, moments, master)
        return search.simulated(MeshCosts(rates, setting))


def _llama(settings: dict[str, str], world: int, tokens: float, gib: float, lacks: str = "") -> PublishedRun:
    return PublishedRun(settings, MeshSizes(dp_shard=world), 2, 1, tokens, gib, lacks=lacks)


def _large(pipeline: Pipeline, tokens: float, gib: float) -> PublishedRun:
    count = pipeline.num_stages
    lacks = f"{DEFAULT}; {ASYNC}; {TILES}"
    return PublishedRun(L405B | FP8 | WHOLE, PP8, 32 // count, count, tokens, gib, pipeline, "recompute", lacks=lacks)


CALIBRATED = "8B, 8 GPUs"
INTERLEAVED = Pipeline(8, "interleaved", 2)
RUNS = {
    CALIBRATED: _llama(L8B, 8, 6667, 77.0),
    "8B, 128 GPUs": _llama(L8B, 128, 6514, 62.0),
    "8B, 8 GPUs, float8": _llama(L8B | FP8, 8, 8532, 76.8, TILES),
    "8B, 128 GPUs, float8": _llama(L8B | FP8, 128, 8380, 61.8, TILES),
    "70B, 256 GPUs, float8": PublishedRun(
        L70B | FP8, MeshSizes(dp_shard=32, tp=8), 16, 1, 829, 71.9, activations="recompute", lacks=TILES
    ),
    "405B, 512 GPUs, 1F1B": _large(Pipeline(8), 100, 82.5),
    "405B, 512 GPUs, interleaved x2": _large(INTERLEAVED, 128, 72.7),
    "DeepSeek-V3, 2048 GPUs": PublishedRun(
        FP8 | WHOLE | {"parallel.dispatch": "fp8"}, MeshSizes(pp=16, dp_shard=128, ep=64), 1, 120, 1e12 / 180e3 / 3600,
        pipeline=Pipeline(16, "dualpipe_v", 2), activations="keep", recipe="moe_671b", gpu=find_published("h100"),
        links=("intra=nvlink4-h800",), source=DEEPSEEK,
        lacks="exchanges of experts overlap there, and reach four nodes at most; norms and MLA's projections up are "
        "computed again there; kernels of many experts at once; a layer more for a second token",
    ),
}  # fmt: skip


def as_there(step: MeshStep) -> float:
    """Bytes of the rank that needs most, with two things as torchtitan's code has them: the loss is `cross_entropy` of
    all logits in FP32, not compiled, and selective recomputation drops the results of every second matmul of a layer.
    """
    setting, shape = step.setting, step.costs.model.shape(step.costs.shape_key)
    tokens = setting.rows * shape.seq_len
    logits = LOGIT_BYTES["cut" if setting.sizes.tp > 1 else "whole"] * tokens * shape.vocab_size
    (layer,) = shape.classes
    outputs = (gemm.num_out for gemm in layer.matmuls if role(gemm.fqn) in DROPPED)
    dropped = shape.matmul_bytes * tokens * sum(outputs) if setting.activations == "selective" else 0
    most = 0.0
    for held, memory in zip(step.costs.held, step.memory, strict=True):
        for name, owners in memory.phases.items():
            found = sum(owners.values())
            if name == "loss":
                found += logits - owners["work"]
            if name.startswith(STEP_PHASES):
                found -= min(dropped * (sum(held.counts) - name.startswith("backward")), owners["activations"])
            most = max(most, found)
    return most


def computation(step: MeshStep) -> dict[str, float]:
    """Shares of a step in which ranks compute, by part of the layers' passes, the head's left out."""
    costs, model, found = step.costs, step.costs.model, dict[str, float]()
    setting, ranks = step.setting, len(costs.ranks)
    for place, one in enumerate(model.whole.classes):
        layer = model.layer_parts(place, setting.rows, setting.activations, costs.shape_key)
        for name, seconds in (*layer.forward().items(), *layer.backward().items()):
            share = setting.count * one.count * seconds / ranks / step.seconds
            found[name] = found.get(name, 0.0) + share
    return found


def calibrated() -> float:
    """The share of the guessed rates at which the first run takes as long as was published."""
    run, low, high = RUNS[CALIBRATED], 0.3, 3.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        found = run.step(middle)
        low, high = (middle, high) if found.tokens_per_s / run.sizes.world < run.tokens_per_s else (low, middle)
    return (low + high) / 2


def main() -> None:
    """All runs."""
    parser_of(__doc__).parse_args()
    share = calibrated()
    print(f"share of the guessed rates: {share:.3f}", flush=True)
    found: dict[str, Any] = {}
    for name, run in RUNS.items():
        step = run.step(share)
        each = step.tokens_per_s / run.sizes.world
        there = as_there(step) / GIB if run.gib else 0.0
        found[name] = {
            "mesh": run.sizes.__dict__, "schedule": run.pipeline.schedule if run.sizes.pp > 1 else "",
            "micro_batches": run.count, "rows": run.rows, "activations": run.activations,
            "published": {"tokens_per_s": run.tokens_per_s, "gib": run.gib}, "source": run.source, "lacks": run.lacks,
            "simulated": {
                "tokens_per_s": each, "gib": step.worst.peak / GIB, "parts": step.parts,
                "computation": computation(step), "gib_as_there": there,
            },
            "off": each / run.tokens_per_s - 1,
            "off_gib": step.worst.peak / GIB / run.gib - 1 if run.gib else None,
            "off_gib_as_there": there / run.gib - 1 if run.gib else None,
        }  # fmt: skip
        print(f"{name:50s} {run.tokens_per_s:7.0f} {each:7.0f} {found[name]['off']:+.1%} "
              f"{run.gib:5.1f} {step.worst.peak / GIB:5.1f} {there:5.1f} GiB", flush=True)  # fmt: skip
    write_result("published_meshes", CLAIM, {"share": share, "calibrated": CALIBRATED, "runs": found}, arguments=())


if __name__ == "__main__":
    main()
