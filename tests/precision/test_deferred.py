"""Weight gradients that wait in a queue: the numbers of those that do not, bit for bit, in each mode of precision and
of activation checkpointing; what is held, and when it is let go."""

import copy
import pickle
import random
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.cover import covering
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.deferred_linear import deferred_linear
from tilewright.ops.base.tensor_parts import computed_part
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import gemms_of
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.mixed.gradient_queues import attach, detach
from tilewright.precision.policy.policy import Policy
from tilewright.training.executor.base import keep_fp32_gradients

KERNELS = Kernels(detect_machine(), compile=False)
VOCAB, LAYERS = 96, 2


def decoder(
    mode=None, *, checkpoint="none", inputs="exact", moe=False, layers=LAYERS, seed=0, kernels=KERNELS, **settings
):
    """A small decoder with weights of its own, in a mode of precision."""
    experts = {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 128, "num_dense_layers": 1} if moe else {}
    sizes = {"dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_dim": 256, "num_layers": layers}
    model = Decoder(DecoderConfig(vocab_size=VOCAB, **sizes, **experts, **settings), kernels)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.06 + (param.ndim == 1))
    if mode is not None:
        convert(model, mode, kernels=kernels)
    model.checkpoint_inputs = inputs
    model.checkpointing = [checkpoint] * layers
    keep_fp32_gradients(list(model.parameters()))
    return model


def twin(model):
    """A copy, whose gradients are kept as the model's."""
    model = copy.deepcopy(model)
    keep_fp32_gradients(list(model.parameters()))
    return model


def batches(count, seed=1):
    """Micro-batches of different shapes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (draw.randint(1, 2), draw.randint(9, 150)), generator=generator)
        yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def plain(model, count=3):
    """Gradients as autograd accumulates them."""
    for batch in batches(count):
        (model.loss(batch).loss_sum * 0.25).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def deferred(model, count=3, late=2):
    """The same gradients, those of weights `late` micro-batches after the others; and how much waited at most."""
    queue = WeightGradientQueue()
    attach(model, queue)
    most = 0
    with queue.region():
        for index, batch in enumerate(batches(count)):
            (model.loss(batch).loss_sum * 0.25).backward()
            queue.cut(index)
            most = max(most, len(queue))
            if index >= late:
                queue.run(index - late)
        for index in range(max(0, count - late), count):
            queue.run(index)
        assert (len(queue), queue.num_bytes) == (0, 0)
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}, most, queue


def assert_equal(found, want, but=()):
    assert found.keys() == want.keys()
    for name, grad in want.items():
        if name not in but:
            off = (found[name].double() - grad.double()).abs()
            assert torch.equal(found[name], grad), f"{name} is off by {off.max()} at {off.argmax()}"
            assert found[name].dtype == grad.dtype, name


MODES = [None, "fp32", "bf16_mixed", "hybrid", "pure_fp16", "fp8_tile", "fp8_hybrid"]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_in_each_mode(mode, moe):
    """Of three micro-batches; all linear layers waited but routers, embedding and norms."""
    model = decoder(mode, moe=moe, tie_embeddings=False)
    want = plain(twin(model))
    found, most, queue = deferred(model)
    assert_equal(found, want)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert most >= 2 * linears
    assert queue.at_once == 0


@pytest.mark.parametrize(
    ("mode", "checkpoint", "inputs"),
    covering(
        ("fp32", "bf16_mixed", "fp8_tile"),
        ("none", "full", "selective", "matmuls", "attention"),
        ("exact", "fp8"),
        pairs=False,
    ),
)
def test_with_each_way_of_checkpointing(mode, checkpoint, inputs):
    """And a layer that is recomputed whole runs twice per micro-batch, no more."""
    model = decoder(mode, checkpoint=checkpoint, inputs=inputs, tie_embeddings=False)
    want = plain(twin(model))
    runs = [0] * LAYERS
    for index, block in enumerate(model.blocks):
        block.post_attention_layernorm.register_forward_hook(
            lambda *_, index=index: runs.__setitem__(index, runs[index] + 1)
        )
    found, _, queue = deferred(model)
    assert_equal(found, want)
    assert queue.at_once == 0
    if checkpoint == "full":
        assert runs == [2 * 3] * LAYERS


@pytest.mark.parametrize("candidate", ["amx", "native", "wide", "ref"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_matmuls_of_each_candidate(candidate, dtype, bias):
    """Bit for bit, with inputs of two and three dims, and parameters in FP32 and in the input's dtype."""
    kernels = Kernels(KERNELS.machine, {"linear": candidate})
    if ("linear", "cpu", dtype, "") in kernels.impossible:
        pytest.skip(str(kernels.impossible["linear", "cpu", dtype, ""]))
    for shape in ((5, 48), (2, 3, 48), (48,)):
        for stored in (torch.float32, dtype):
            generator = torch.Generator().manual_seed(len(shape))
            weight = nn.Parameter(torch.randn(40, 48, generator=generator).to(stored))
            offset = nn.Parameter(torch.randn(40, generator=generator).to(stored)) if bias else None
            x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            upstream = torch.randn(*shape[:-1], 40, generator=generator).to(dtype)
            results = []
            for queue in (None, WeightGradientQueue()):
                weight.grad = x.grad = None
                if offset is not None:
                    offset.grad = None
                if queue is None:
                    kernels.linear(x, weight, offset).backward(upstream)
                else:
                    with queue.region():
                        kernels.linear(x, weight, offset, queue).backward(upstream)
                        assert weight.grad is None
                        queue.cut(0)
                        queue.run(0)
                results.append([x.grad, weight.grad, *([] if offset is None else [offset.grad])])
            for name, want, found in zip(("x", "weight", "bias"), *results, strict=False):
                assert torch.equal(want, found), (name, shape, stored, (want - found).abs().max())


def test_tied_weights_get_both_gradients():
    """The head's after the embedding's: in one micro-batch the same sum; in several another order of sums, within three
    roundings of FP32."""
    model = decoder("fp32")
    want, (found, _, _) = plain(twin(model), 1), deferred(twin(model), 1)
    assert_equal(found, want)
    want, (found, _, _) = plain(twin(model)), deferred(model)
    tied = "model.embed_tokens.weight"
    assert_equal(found, want, but={tied})
    off = (found[tied] - want[tied]).abs().max() / want[tied].abs().max()
    assert off <= 3 * torch.finfo(torch.float32).eps


def test_frozen_layers_and_adapters():
    """A frozen weight queues nothing; adapters get their gradients at once."""
    model = decoder("fp8_tile", tie_embeddings=False)
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    want = plain(twin(model))
    found, most, _ = deferred(model, 1, late=0)
    assert most == 7 + 1  # the other layer's, and the head
    model.zero_grad()
    assert_equal(deferred(model)[0], want)
    model = decoder("bf16_mixed", tie_embeddings=False)
    add_lora(model, rank=4)
    want = plain(twin(model))
    found, most, _ = deferred(model)
    assert_equal(found, want)
    assert most == 0
    assert any("lora" in name for name in found)


@pytest.mark.parametrize("stored", ["value", "qdata"])
def test_a_queue_of_fp8_holds_codes(stored):
    """Of two layers that read one input: a byte for each element of the input, once, and of both gradients, and FP32
    scales of 128 elements. BF16 holds two bytes each. So too where backward keeps the input itself."""
    rows, width = 256, 512
    found = {}
    for policy in (Policy("bf16_mixed"), Policy("fp8_tile", keep=stored)):
        model = decoder(tie_embeddings=False).blocks[0].mlp
        model.gate_proj, model.up_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        layers = [model.gate_proj, model.up_proj]
        convert(model, policy, kernels=KERNELS)
        queue = WeightGradientQueue()
        attach(model, queue)
        x = torch.randn(rows, width).bfloat16().requires_grad_()
        with queue.region():
            sum(layer(x).square().sum() for layer in layers).backward()
            found[policy.mode] = queue.num_bytes
            queue.cut(0)
            queue.run(0)
    elements = 3 * rows * width if stored == "qdata" else 4 * rows * width
    assert found["fp8_tile"] == elements + 4 * elements // 128
    assert found["bf16_mixed"] == 2 * 3 * rows * width


def test_bytes_in_flight_do_not_grow_with_the_vocabulary():
    """The head's wait holds its input, not an FP32 gradient of its weight per micro-batch; nor does the graph."""
    model = decoder("bf16_mixed", tie_embeddings=False)
    queue = WeightGradientQueue()
    attach(model.lm_head, queue)
    (batch,) = batches(1)
    with queue.region():
        model.loss(batch).loss_sum.backward()
        tokens = batch["labels"].numel()
        assert queue.num_bytes == tokens * 128 * 2 + batch["labels"].untyped_storage().nbytes()
        queue.cut(0)
        queue.run(0)


def test_two_models_two_threads_and_regions_inside_regions():
    """Each queue has what its own model's backward has left, whatever is open around it."""
    models = [decoder("fp8_tile", seed=seed, tie_embeddings=False) for seed in range(3)]
    wants = [plain(twin(model)) for model in models]
    founds = {}
    threads = [
        threading.Thread(target=lambda index=index: founds.__setitem__(index, deferred(models[index])[0]))
        for index in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    outer, inner = models[0], models[2]
    assert_equal(founds[0], wants[0])
    assert_equal(founds[1], wants[1])
    outer.zero_grad()
    queue = WeightGradientQueue()
    attach(outer, queue)
    with queue.region():
        (first, *others) = batches(3)
        (outer.loss(first).loss_sum * 0.25).backward()
        waiting = len(queue)
        assert_equal(deferred(inner)[0], wants[2])
        assert len(queue) == waiting
        for batch in others:
            (outer.loss(batch).loss_sum * 0.25).backward()
        queue.cut(0)
        queue.run(0)
    assert_equal({name: param.grad for name, param in outer.named_parameters()}, wants[0])


def pass_of(model, queue, batch, *, fails=False):
    """A region that ends too early."""
    with queue.region():
        model.loss(batch).loss_sum.backward()
        assert len(queue)
        if fails:
            raise ZeroDivisionError
        queue.cut(4)


def test_what_is_left_is_an_error_and_an_exception_drops_it():
    model = decoder("fp8_tile")
    queue = WeightGradientQueue()
    attach(model, queue)
    (batch,) = batches(1)
    told = r"(?s)not computed by the end of the step.*micro-batches \[4\].*queue.run"
    with pytest.raises(ConfigError, match=told):
        pass_of(model, queue, batch)
    assert (len(queue), queue.num_bytes) == (0, 0)
    with pytest.raises(ZeroDivisionError):
        pass_of(model, queue, batch, fails=True)
    assert (len(queue), queue.num_bytes) == (0, 0)
    model.zero_grad()
    want = plain(decoder("fp8_tile"), 1)
    assert_equal(plain(model, 1), want)  # outside of a region nothing waits
    model.zero_grad()
    assert_equal(deferred(model, 1)[0], want)


def test_graphs_that_outlive_their_region_give_all_gradients():
    """The head's too, which keeps no gradient of its own in a region."""
    model = decoder("bf16_mixed", tie_embeddings=False)
    want = plain(twin(model), 1)
    queue = WeightGradientQueue()
    attach(model, queue)
    (batch,) = batches(1)
    with queue.region():
        loss = model.loss(batch).loss_sum * 0.25
    loss.backward()
    assert_equal({name: param.grad for name, param in model.named_parameters()}, want)


def test_copies_and_pickles_have_closed_queues_of_their_own():
    model = decoder("fp8_tile", tie_embeddings=False)
    queue = WeightGradientQueue()
    attach(model, queue)
    with queue.region():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.loss(next(batches(1))).loss_sum.backward()
            assert twin.lm_head.weight.grad is not None
            assert not len(queue)
            assert twin.lm_head.weight_queue is twin.blocks[0].mlp.up_proj.weight_queue is not queue


def test_attached_and_detached():
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kinds, names = [type(layer) for layer in layers], list(layers.state_dict())
    assert attach(layers, WeightGradientQueue()) == ["0", "2"]
    assert list(layers.state_dict()) == names
    detach(layers)
    assert [type(layer) for layer in layers] == kinds


def test_chunked_mlps_sum_their_own_gradients():
    model = decoder("bf16_mixed", tie_embeddings=False)
    assert chunk_mlps(model, 2, print)
    want = plain(twin(model))
    found, _, queue = deferred(model)
    assert_equal(found, want)
    assert queue.at_once > 0


def test_hooks_of_a_parameter_see_its_late_gradient():
    """As this package's buckets need it. (Autograd runs them in the backward pass too, which has brought nothing.)"""
    model = decoder("bf16_mixed")
    seen = []
    weight = model.blocks[0].self_attn.q_proj.weight
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad if param.grad is None else 1))
    deferred(model, 2, late=1)
    assert seen == [None, None, 1, 1]


def test_the_tracker_counts_what_waits():
    """On top of the activations that it measures, at each boundary."""
    model = decoder("bf16_mixed", tie_embeddings=False)
    queue, tracker = WeightGradientQueue(), MemoryTracker("cpu")
    attach(model, queue)
    tracker.count_beside(queue.owned_bytes)
    seen = {}
    for waits in (False, True):
        with queue.region():
            with tracker.phase("forward"):
                loss = model.loss(next(batches(1))).loss_sum
            with tracker.phase("backward"):
                loss.backward()
                queue.cut(0)
                num_bytes = queue.num_bytes
                if not waits:
                    queue.run(0)
            seen[waits] = tracker.snapshot(model, None)["phase_owners"]["backward"]["activations"]
            if waits:
                queue.run(0)
    assert num_bytes > 0
    assert seen[True] >= num_bytes
    tracker.close()


@pytest.fixture
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_part_of_a_parameter_that_ranks_share_waits_what_is_the_parameter_s(mesh, dtype):
    """Also where gradients are wider than weights: the part is a leaf of its own then."""
    torch.manual_seed(0)
    whole, inputs = torch.randn(4, 3).to(dtype), [torch.randn(rows, 3).to(dtype) for rows in (5, 2)]
    grads = []
    for waits in (False, True):
        param, queue = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])), WeightGradientQueue()
        param.grad_dtype = torch.float32
        with queue.region():
            for number, x in enumerate(inputs):
                with nullcontext() if waits else queue.paused():
                    out = deferred_linear(gemms_of("native"), x, computed_part(param), None, queue)
                    out.float().square().sum().backward()
                queue.cut(number)
            assert len(queue) == (len(inputs) if waits else 0)
            for number in range(len(inputs)):
                queue.run(number)
        grads.append(param.grad.to_local())
    assert grads[0].dtype == torch.float32
    assert torch.equal(*grads)
