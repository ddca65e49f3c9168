"""`[parallel]`: processes that share a run, and what each of them has."""

from typing import Literal

from pydantic import Field

from tilewright.core.config.section import Count, Section

ScheduleName = Literal[
    "1f1b", "gpipe", "interleaved", "interleaved_deferred", "interleaved_zero_bubble", "zbv", "dualpipe_v"
]
V_SCHEDULES: tuple[ScheduleName, ...] = ("zbv", "dualpipe_v")
"""Two stages per process, as far from the first one as from the last: the first process has both ends."""
INTERLEAVED: tuple[ScheduleName, ...] = ("interleaved", "interleaved_deferred", "interleaved_zero_bubble")
"""As many stages per process as is said."""
DEFERRING: tuple[ScheduleName, ...] = ("interleaved_deferred", "interleaved_zero_bubble", *V_SCHEDULES)
"""Weight gradients are computed later than those of inputs."""
WireName = Literal["fp32", "bf16", "fp8"]
DispatchName = Literal["stream", "fp8"]
GatherName = Literal["as_read", "fp8"]
EXPERT_SHARDS = "efsdp"
"""The axis of the mesh over which experts are sharded that are spread over `ep` (`tilewright.parallel.mesh`)."""


class ParallelSection(Section):
    """Processes that torchrun starts, and how they share the work. See `tilewright.parallel`."""

    changes_numbers = (
        *("pp", "schedule", "virtual_stages", "split", "balance", "resplit"),
        *("dp_replicate", "dp_shard", "tp", "sequence_parallel", "ep", "cpu_offload", "reduce_each", "dispatch"),
        *("grad_sync", "grad_feedback", "grad_sync_error", "place_experts", "expert_order", "redundant_experts"),
    )
    keeps_numbers = ("reshard_after_forward", "param_gather", "timeout_minutes")

    pp: Count = Field(default=1, ge=1)
    """Processes in a row, each of which holds different layers of a copy (a pipeline); they read the same rows. The
    first has the embedding, the last the head and the loss. Takes torch 2.13."""
    schedule: ScheduleName = "1f1b"
    """Stages: in what order forward and backward passes of micro-batches run. `1f1b`: as few micro-batches under way as
    stages; takes at least as many. `gpipe`: all forward passes, then all backward passes; takes any number.
    `interleaved`: several stages per process, for less idle time. `interleaved_deferred`: the same, with gradients of
    inputs sent before weight gradients are computed. `interleaved_zero_bubble`: with weight gradients computed later,
    where a process would wait; less idle time than the one before where messages take none, else more. `zbv` and
    `dualpipe_v`: that with two stages per process, the first and the last one on the first process; `dualpipe_v` takes
    at least as many micro-batches as stages."""
    virtual_stages: Count = Field(default=2, ge=2)
    """Stages: how many the interleaved schedules give each process."""
    split: tuple[Count, ...] = ()
    """Stages: layers of each one, in the order of the layers, as in `[7, 5]`. Empty: such that the process with most
    work has little of it, by FLOPs of rows of `data.seq_len`, head included; where that is as well done by as many in
    each, and one more in the first ones, so."""
    balance: Literal["off", "on"] = "off"
    """Stages, with `data.rows = "documents"`: which documents share a micro-batch, on which process, in what order, and
    in how many micro-batches. `off`: as few as it takes, in the order of the stream. `on`: such that all take as long,
    by a cost model that is fitted to measured seconds. A step has the same documents either way. Sums are added in
    another order, which depends on what was measured: the last digits of losses differ from run to run."""
    resplit: Literal["off", "on"] = "off"
    """Stages: after a checkpoint on the way, move layers from slow processes to fast ones, where measured seconds say
    that the steps that are left save more than twice what it takes to begin again with that split."""
    dp_replicate: Count = Field(default=1, ge=1)
    """Copies of the model. Each trains on its share of the global batch; gradients are summed over the copies."""
    dp_shard: Count = Field(default=-1, ge=-1)
    """Processes that share one copy: parameters, gradients and optimizer states are cut into so many parts (FSDP2). -1:
    as many as `dp_replicate` leaves."""
    tp: Count = Field(default=1, ge=1)
    """Processes that each hold a part of every matrix of a layer (tensor parallelism), and read the same rows: heads of
    attention, hidden width of MLPs, vocabulary. Divides the numbers of heads and the hidden width. With `dp_shard` each
    of these parts is sharded over the processes that hold it. Routed experts are not cut: they are sharded, or spread
    (`ep`), over all of these processes, each of which sends other tokens through them."""
    sequence_parallel: bool = True
    """Matrices that are cut: each process has some positions of the residual stream between attention and MLP, where it
    computes norms and sums and keeps what backward reads. False: all of it, for fewer and larger messages."""
    ep: Count = Field(default=1, ge=1)
    """Processes that each hold different experts of a mixture, and send the rows of tokens to each other. Divides
    `dp_shard x tp` and the number of experts; each expert is sharded over the `dp_shard x tp / ep` processes that hold
    it. Takes torch 2.13."""
    dispatch: DispatchName = "stream"
    """Spread experts: what rows of tokens travel to them as. `stream`: the format of the residual stream. `fp8`:
    rounded to E4M3 under a power-of-two scale per 128 values of a row, half the bytes of BF16; results and gradients
    travel as they are."""
    place_experts: Literal["off", "on"] = "off"
    """Spread experts: after a checkpoint on the way, move experts to processes such that all get about as many rows,
    by the rows of the steps so far, where the steps that are left may save more than twice what it takes to begin again
    so. Losses and weights are the same, but for the order of sums in the norm that clips."""
    expert_order: tuple[Count, ...] = ()
    """Spread experts: the numbers of each layer's experts in the order of the processes that hold them, layer after
    layer, each process's in their own order. Empty: the first processes hold the first ones. Set by
    `place_experts`."""
    redundant_experts: Count = Field(default=0, ge=0)
    """Spread experts: how many more experts each process holds of a layer, copies of those that get most rows. Such
    an expert's rows are divided evenly over its copies; their gradients are added up, so that all copies stay the same.
    `place_experts` chooses them; before that, and where `expert_order` is empty, they are the first experts of the next
    process."""
    reshard_after_forward: bool = True
    """Sharded: free a layer's gathered parameters after its forward pass, and gather them again for backward (ZeRO-3).
    False keeps them (ZeRO-2): less communication, more memory."""
    param_gather: GatherName = "as_read"
    """Sharded: what parameters are gathered as. `as_read`: in 16 bits where layers multiply in these, else as they are
    stored. `fp8`: one byte per weight, the codes that matmuls in tiles of FP8 (`fp8_tile`, `fp8_hybrid`, power-of-two
    scales) read anyway, so that no result changes; all other parameters `as_read`, and these too once their matmuls
    leave 8 bits."""
    cpu_offload: bool = False
    """Sharded: keep each process's part of parameters, gradients and states in host memory, and update it there."""
    reduce_each: bool = False
    """Sharded, with gradient accumulation: sum gradients after each micro-batch, so that each process keeps only its
    part of them between micro-batches. More communication, less memory. False: once per step."""
    grad_sync: WireName = "fp32"
    """Wire format of gradients between processes, which add them in FP32 either way. `bf16`: half the bytes, rounded
    to 8 bits. `fp8`: a quarter of the bytes, rounded to E4M3 under a power-of-two scale per 128 values. An overflow or
    NaN in a gradient arrives as NaN."""
    grad_feedback: bool = False
    """Add what `grad_sync` has lost of a gradient to the gradient of the next step. Takes 2 bytes per parameter of the
    whole model in each process, and twice that at the end of a step."""
    grad_sync_error: float = Field(default=0.0, ge=0, lt=1)
    """Send gradients in the next wider format (`fp8`, `bf16`, `fp32`) from then on, where the error of their sum was
    more than this share of the sum in two measurements in a row. Every 50th step is measured, by sending what was lost
    as FP32 too; all processes decide alike. 0: the format stays."""
    timeout_minutes: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Processes that wait so long for another one name it and its phase, and all end: in any collective, and at the
    start of a run where it neither computes nor writes. torchrun can start all again."""

    @property
    def numbers_by_name(self) -> bool:
        """True if by the parallel section a parameter's draws depend on its name in the whole model, and not on what
        else is on its rank."""
        return self.pp > 1 or self.place_experts == "on" or bool(self.expert_order)

    @property
    def stages_per_process(self) -> int:
        """Stages of a pipeline that each process holds, by the parallel section.

        Example:
            >>> names = "1f1b", "interleaved", "zbv"
            >>> [ParallelSection(schedule=name, virtual_stages=3).stages_per_process for name in names]
            [1, 3, 2]
        """
        if self.schedule in V_SCHEDULES:
            return 2
        return self.virtual_stages if self.schedule in INTERLEAVED else 1
