"""The recipe: every setting of a run, typed, documented and strict.

One frozen model a section. A section is owned by the package of its name; components take plain
arguments, so Python users never need these classes. Unknown keys are errors. Derived values are
never written back here. `core.config.load` builds a `Recipe` from files, environment and command line.
"""

from typing import Annotated, Literal

from pydantic import Field

from tilewright.core.config.executors import Capabilities, ExecutorName, capabilities_of
from tilewright.core.config.section import EVERY, Bytes, Count, MadePath, PathText, Place, Section
from tilewright.core.config.sections.data import MixingSection, StreamingSection
from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.config.sections.energy import EnergySection
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.config.sections.parallel import ParallelSection
from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.env import MOST_THREADS

ActivationCheckpoint = Literal["none", "selective", "matmuls", "attention", "full"]
CheckpointInputs = Literal["exact", "fp8"]
"""none: keep all activations; selective: keep outputs of matmuls and attention; matmuls, attention: of one of them;
full: recompute each layer."""
LinearBackend = Literal["auto", "amx", "wide", "native", "ref"]
AttentionBackend = Literal["auto", "amx", "avx512", "wide", "varlen", "efficient", "native", "ref"]
LinearAttentionBackend = Literal["auto", "chunked", "ref"]
FollowBackend = Literal["auto", "triton", "ref"]
NormBackend = Literal["auto", "native", "ref"]
NewtonSchulzBackend = Literal["auto", "wide", "native", "ref"]
Backend = Literal["auto", "compiled", "native", "ref"]
AdamBackend = Literal["auto", "compiled", "native", "cpu", "ref"]
QuantizeBackend = Literal["auto", "triton", "cpu", "ref"]
Tier = Literal["device", "host", "disk"]
"""Where bytes are kept while nothing reads them."""
Offload = Literal["none", "cpu", "disk"]
TIERS: dict[Offload, Tier] = {"none": "device", "cpu": "host", "disk": "disk"}
TileGemmBackend = Literal["auto", "scaled_mm", "triton", "cpu", "dequant", "ref"]


class RunSection(Section):
    changes_numbers = ("seed", "device", "threads")
    keeps_numbers = ("name", "dir")

    name: str = ""
    """Name of the run folder inside `dir`. Empty: the recipe's file name."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = Field(default=1234, ge=0, le=2**63 - 1)
    """Seeds initial weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. `auto` takes a CUDA GPU where there is one."""
    threads: int = Field(default=0, ge=0, le=MOST_THREADS)
    """CPU threads for torch. 0: one per physical core."""


class DataSection(Section):
    changes_numbers = EVERY
    keeps_numbers = ("cache_dir", "prefetch")

    source: Annotated[str, Place(words=("installed",))] = "installed"
    """`installed`: the text that this installation carries. Else a path: a folder of text files, .jsonl(.gz/.zst),
    .parquet, a Hugging Face dataset on disk or as `hf://org/name`, or (image_classification) a folder with one
    sub-folder per class; the folder that `tilewright data build` filled, or its address, `s3://bucket/folder`."""
    format: Literal["text", "chat", "preferences"] = "text"
    """Content of rows. `chat`: conversations, rendered by a chat template, of which only the assistant's answers are
    learned. A row is recognised by its fields: `messages`, ShareGPT's `conversations`, Alpaca's `instruction` and
    `output`, or `prompt` and `completion`. `preferences`: a prompt with a `chosen` and a `rejected` answer; learned by
    direct preference optimization."""
    sources: Annotated[dict[str, str], Place()] = Field(default={})
    """Several paths, or addresses of built datasets, each a domain of the name that it is given, in the place of
    `source`. `weights` mixes them."""
    chat_template: Annotated[str, Place(words=("chatml",), bare=False)] = ""
    """chat: empty for the template of the model's folder (or the tokenizer's); a .jinja file, a folder, the name of one
    of several templates of the model; or `chatml`, for base models that bring none."""
    domains: tuple[str, ...] = ()
    """Keep only these domains. Empty: all."""
    weights: dict[str, float] = Field(default={})
    """Mixture weights by domain. Empty: in proportion to tokens."""
    mixing: MixingSection = MixingSection()
    streaming: StreamingSection = StreamingSection()
    max_bytes: Bytes = 24_000_000
    """Use at most this much text, shared over the domains. 0: no limit."""
    holdout: float = Field(default=0.02, ge=0, lt=0.5)
    """Share held out for evaluation, by clusters of near-copies. 0: nothing of your own text or conversations; a path
    in `eval_source` is then what is held out."""
    eval_source: Annotated[str, Place(words=("installed",))] = ""
    """`installed` or a path as in `source`, evaluated and never trained on. With `holdout = 0` a path is your own
    validation data, in the same `format`: all of it is the held-out part. Else it is other text or conversations,
    evaluated beside the held-out part: what a fine-tune forgets. Empty: none."""
    seq_len: Count = Field(default=512, ge=8)
    """Tokens in one packed row. With `rows = "documents"` the longest document: longer ones are split."""
    rows: Literal["packed", "documents"] = "packed"
    """Form of a micro-batch. `packed`: rows of `seq_len` tokens, each filled with documents and pieces of them.
    `documents`: whole documents behind each other, in one row that is as long as they are. A step is then the next
    documents with at most `train.global_batch_size` times `seq_len` tokens, a micro-batch has at most
    `train.micro_batch_size` times `seq_len`."""
    vocab_size: Count = Field(default=8192, ge=300)
    """Size of the BPE tokenizer trained on the data. Read where `tokenizer` is empty and no weights are loaded."""
    tokenizer: PathText = ""
    """A tokenizer.json, or a folder that holds one. Empty: the one in `model.path` where weights are loaded from there;
    else one is trained on the data and cached."""
    text_field: str = "text"
    """Field of .jsonl, .parquet and dataset rows that holds the text."""
    image_size: Count = Field(default=64, ge=8)
    """image_classification: side in pixels that images are resized to."""
    cache_dir: MadePath = ""
    """Where prepared data is kept. Empty: the user's cache folder."""
    prefetch: Count = Field(default=2, ge=0)
    """Batches prepared ahead in a background thread. 0: none."""


class OptimSection(Section):
    changes_numbers = EVERY

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: matrices of hidden layers are updated by their momentum, orthogonalised; embeddings, output head, routers
    and vectors by AdamW. It keeps one state per weight of a matrix where AdamW keeps two."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate. Muon multiplies it by 0.2 times the root of a matrix's longer side, so that a rate that suits
    AdamW suits both."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: share of a matrix's momentum that is kept from step to step."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay, on matrices only."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Storage of AdamW's two moments, and of Muon's momentum. `8bit`: one byte per number, and a scale for 128 of
    them."""
    master_weights: Literal["fp32", "split24", "stochastic"] = "fp32"
    """FP32 master weights; or weights kept in BF16 and updated with stochastic rounding, alone (`stochastic`) or with
    8 bits more that only the optimizer reads (`split24`, with 8-bit moments)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate over the steps. `wsd`: warm-up, stable, then decay over the last `decay_fraction`."""
    warmup_steps: Count = Field(default=20, ge=0)
    """Steps in which the rate rises linearly to `lr`."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """wsd: share of the steps at the end in which the rate falls."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate as a share of `lr`."""
    clip: Literal["two_pass", "delayed"] = "two_pass"
    """layer_major: `two_pass` computes the global norm in a first backward pass over all layers and updates in a second
    one. `delayed` needs one pass: each layer group is scaled by the norm of the previous step, and each matrix moves by
    no more than its own gradient allows."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm. 0: no clipping."""
    clip_adaptive: float = Field(default=0.0, ge=0)
    """Clip to this many times the running mean of the norm where that is below `clip_norm`. 0: off."""
    clip_elements: float = Field(default=0.0, ge=0)
    """Clip each element of the gradient to plus or minus this, before the norm. 0: off. (An article has 6.)"""
    clip_threshold: float = Field(default=1e5, gt=0)
    """A step whose gradient norm is above this is skipped and counted, like an overflow."""


class LoraSection(Section):
    """Adapters on frozen linear layers, instead of training the whole model. See `tilewright.precision.lora.lora`."""

    changes_numbers = EVERY

    rank: Count = Field(default=0, ge=0)
    """Width of the adapters. 0: none, the whole model is trained."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied by `alpha / rank`."""
    rslora: bool = False
    """An adapter's output is multiplied by `alpha / sqrt(rank)`, so that its rate does not fall with its width."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zero in training."""
    targets: tuple[str, ...] = ("*",)
    """Globs on the names of linear layers that get an adapter. Heads, routers and embeddings never do."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that train as a whole beside the adapters and are saved with them, such as `embed_tokens` and `lm_head`:
    names, their last parts, or globs. Modules that share a weight are named together."""
    base: Literal["fp8", "keep"] = "fp8"
    """Storage of the layers' frozen weights: E4M3 with a scale for each 128x128 block, one byte per weight, as
    folders of DeepSeek-V3 hold them; or as they are."""


class TrainSection(Section):
    changes_numbers = ("steps", "global_batch_size", "micro_batch_size", "activation_checkpoint", "checkpoint_inputs")
    changes_numbers += ("compile", "dpo_beta")
    keeps_numbers = ("minutes", "log_interval", "eval_interval", "eval_batches", "eval_part_batches", "sample_tokens")

    steps: Count = Field(default=400, ge=0)
    """Optimizer steps. 0: as many as fit into `minutes`. Where one file gives both, `steps` counts. Where two sources
    give one each, such as recipe and command line, the one that takes precedence counts."""
    minutes: float = Field(default=0.0, ge=0, le=525_600, allow_inf_nan=False)
    """How long to train, first compilation and evaluations on the way included; preparation of data, and what follows
    the last step, are not. The first steps are timed and thrown away; then the number of steps is fixed and written to
    run.toml, whatever happens to their speed later. 0: `steps` says how many."""
    global_batch_size: Count = Field(default=16, ge=1)
    """Rows (sequences or images) in one optimizer step, over all ranks. A pair of preferences is two rows."""
    micro_batch_size: Count = Field(default=8, ge=1)
    """Rows per forward pass; the rest is gradient accumulation."""
    activation_checkpoint: ActivationCheckpoint = "none"
    """Kept by a layer for backward: all activations; results of matmuls and of attention, so that only the cheap
    rest is recomputed; of matmuls alone; of attention alone; or only its input, so that it is recomputed whole."""
    checkpoint_inputs: CheckpointInputs = "exact"
    """With `activation_checkpoint = "full"`: keep each layer's input as it is, or in E4M3 with a scale for each 1x128
    tile, one byte per element. The loss stays exact; the layer is then recomputed from the rounded input, so gradients
    are approximate (about 3 % noise)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers. `auto`: where a compiler is found and the model is tilewright's own."""
    log_interval: Count = Field(default=10, ge=1)
    """Steps between progress lines."""
    eval_interval: Count = Field(default=100, ge=0)
    """Steps between evaluations. 0: only at the end."""
    eval_batches: Count = Field(default=4, ge=1)
    """Micro-batches evaluated per domain."""
    eval_part_batches: Count = Field(default=0, ge=0)
    """Number of `eval_batches` per domain that evaluations on the way take, the same ones each time; the last
    evaluation, and that of loaded weights, takes all. 0: all each time."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """preferences: how strongly the model is held to the one that training began with; small: loosely."""
    sample_tokens: Count = Field(default=64, ge=0)
    """Length of the text sample in the report. 0: none."""


class MemorySection(Section):
    """Place of all bytes during a step. See `tilewright.memory`."""

    changes_numbers = ("plan", "executor", "layers_per_group", "rollback", "mlp_chunks", "loss_chunk_bytes")
    changes_numbers += ("attention_block",)
    keeps_numbers = ("offload_params", "offload_optimizer", "offload_activations", "offload_dir", "prefetch")

    plan: Annotated[str, Place(words=("auto",))] = "auto"
    """`auto`: a recipe that does not fit as it stands is planned: what it leaves at its default is decided for each
    layer, and what would change the results comes last. A path: the plan file that `tilewright plan --out` wrote.
    Empty: everything as the recipe says."""
    executor: Literal["standard", "layer_major"] = "standard"
    """`standard`: one micro-batch after the other through the whole model. `layer_major`: all micro-batches through one
    layer group, then the next; backward recomputes a group, updates its parameters at once, and frees it."""
    layers_per_group: Count = Field(default=1, ge=1)
    """layer_major: layers that are fetched, computed and updated together."""
    offload_params: Offload = "none"
    """layer_major: where parameters are kept while their layers are not computed. A layer group is copied to the device
    while it is used. On a CPU run `cpu` is the same memory as `none`; `disk` frees it."""
    offload_optimizer: Offload = "none"
    """layer_major: where the optimizer's states are kept. Those of a layer group are copied to the device for its
    update."""
    offload_activations: Offload = "none"
    """layer_major: where the layers' inputs are kept until the backward pass. `train.checkpoint_inputs` is their
    format."""
    offload_dir: MadePath = ""
    """Folder of the files that `disk` uses. They have no names and are gone with the process. Empty: the run folder."""
    prefetch: Count = Field(default=1, ge=0)
    """layer_major: layer groups that are fetched, or written back, while another one is computed. Each takes a buffer
    of the size of the largest group."""
    rollback: Literal["buffer", "checkpoint"] = "buffer"
    """layer_major with `optim.clip = "delayed"`: how a step is undone whose gradient turns out not to be finite after
    some groups were updated. From a copy of their bytes before the step, or from the newest checkpoint."""
    mlp_chunks: Count = Field(default=1, ge=1)
    """Chunks into which an MLP's tokens are cut, forward and backward, so that the wide hidden values of one chunk are
    in memory. Costs one more forward pass of the MLPs. Not for mixtures of experts."""
    loss_chunk_bytes: Bytes = Field(default=64 * 2**20, ge=1)
    """Bytes of logits alive at once in the loss of an output head, forward and backward; one row at least. On a GPU the
    default is 1 GiB, at most a 64th of its memory. Not for Hugging Face models whose head is more than one matmul:
    their logits are whole."""
    attention_block: Count = Field(default=0, ge=0)
    """Query rows at a time in attention, so that packed documents need no mask of `seq_len` x `seq_len`. 0: all at
    once. Compiled, and on a GPU, the scores of a block are in memory. tilewright's own decoder only."""

    @property
    def can(self) -> Capabilities:
        """Capabilities of the recipe's executor."""
        return capabilities_of(self.executor)

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier]:
        """The memory tiers in which a recipe keeps parameters, optimizer states and layer inputs."""
        return TIERS[self.offload_params], TIERS[self.offload_optimizer], TIERS[self.offload_activations]


class CheckpointSection(Section):
    keeps_numbers = ("interval_minutes", "interval", "save_last", "keep_latest_k", "async_save", "resume")
    keeps_numbers += ("export_hf", "export_format")

    interval_minutes: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Minutes of training between checkpoints, the work that a power cut can cost: one is written after the step in
    which they have passed since the last. One more is written at the end and on a signal (SIGTERM, Ctrl-C). 0: off."""
    interval: Count = Field(default=0, ge=0)
    """Steps between checkpoints, in addition. 0: off."""
    save_last: bool = True
    """Write a checkpoint after the last step. False is for models whose checkpoint fits on no disk of this machine: the
    trained weights are gone at the end, unless `export_hf` keeps them."""
    keep_latest_k: Count = Field(default=3, ge=1)
    """Newest checkpoints kept."""
    async_save: bool = True
    """Write in a background thread while training continues."""
    resume: Literal["auto", "never", "required"] = "auto"
    """Continue from the newest valid checkpoint of the run folder."""
    export_hf: bool = False
    """Write a Hugging Face folder at the end; with `lora.rank` the adapter alone, in the layout of peft."""
    export_format: Literal["keep", "bf16", "fp8"] = "keep"
    """Format of the weights in that folder. `keep`: that of the parameters. `fp8`: the layout of DeepSeek-V3, linear
    weights of the layers in E4M3 with a scale for each 128x128 block, the rest in BF16."""


class LogSection(Section):
    keeps_numbers = ("sinks", "report")

    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where metrics go in addition to metrics.jsonl, which is always written."""
    report: bool = True
    """Write report.html at the end."""


class OpsSection(Section):
    """Which implementation of each operation. `tilewright doctor` lists those there are, with reasons."""

    changes_numbers = EVERY

    linear: LinearBackend = "auto"
    """Matmuls of linear layers: with FP32 weight gradients on a CPU's AMX tiles, with 16-bit operands widened to FP32,
    or torch's own."""
    attention: AttentionBackend = "auto"
    """Causal attention: in C++ for BF16 on AMX tiles or AVX-512, with 16-bit operands widened, or torch's kernels; on
    GPUs by documents."""
    linear_attention: LinearAttentionBackend = "auto"
    """Linear attention: by chunks of positions, or position by position."""
    rms_norm: NormBackend = "auto"
    """RMSNorm."""
    cross_entropy: Backend = "auto"
    """Output head and loss together."""
    adam: AdamBackend = "auto"
    """AdamW update, with moments in FP32 or BF16."""
    low_bit_adam: QuantizeBackend = "auto"
    """AdamW update with moments in 8 bits."""
    follow_writes: FollowBackend = "auto"
    """FP32 masters that take over what other code wrote to their 16-bit weights."""
    newton_schulz: NewtonSchulzBackend = "auto"
    """Muon's iteration: `wide` in FP32, for CPUs that do not multiply BF16; `native` in BF16."""
    quantize: QuantizeBackend = "auto"
    """Encoding to 8-bit tiles, alone or with a norm or activation: Triton, C++ built at first use, or torch."""
    tile_gemm: TileGemmBackend = "auto"
    """Matmuls of 8-bit operands: torch's own on GPUs with 8-bit units, Triton, or decoded to BF16, or FP32 where the
    CPU has no BF16 instructions (cpu, dequant)."""


class PlanSection(Section):
    changes_numbers = ("device_memory", "margin")
    keeps_numbers = ("enforce",)

    device_memory: Bytes = 0
    """Memory the run may use on the device. 0: all of it."""
    margin: float = Field(default=0.05, ge=0, lt=0.9)
    """Share of each budget that a plan leaves free: predictions err, and other programs live there too."""
    enforce: bool = True
    """Refuse to start (exit 3) when the plan says that the run does not fit."""


class Recipe(Section):
    """All settings of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    precision: PrecisionSection = PrecisionSection()
    optim: OptimSection = OptimSection()
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    distill: DistillSection = DistillSection()
    memory: MemorySection = MemorySection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    parallel: ParallelSection = ParallelSection()
    energy: EnergySection = EnergySection()
    ops: OpsSection = OpsSection()
    plan: PlanSection = PlanSection()

    @property
    def executor(self) -> ExecutorName:
        """Name of the executor that runs the recipe's steps: `memory.executor`, or the one for stages."""
        return "pipeline" if self.parallel.pp > 1 else self.memory.executor
