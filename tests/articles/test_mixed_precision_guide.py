"""Code samples of the article "DeepSeek mixed precision training: a guide from theory to deployment".

Each test holds a sample as printed, line breaks restored, where it can run, what was wrong with it, and the mended form
against tilewright. The list of all samples and where they are tested is docs/explanation/articles.md.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewright
from tilewright import DeepSeekAdam, DynamicScaler, GradClip, Policy, Rule, load_recipe

FP16 = Policy("hybrid", (Rule(op="linear", compute="fp16"),))


def toy() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, nn.CrossEntropyLoss(), torch.randn(8, 16), torch.randint(0, 4, (8,))


def test_amp_sample():
    """Sample 1, switching precision with torch's AMP.

    Wrong: `torch.cuda.amp.autocast` takes no device_type (`torch.amp.autocast` does), and both names are deprecated.
    The import and the next statement share a line.
    """
    from torch.cuda.amp import autocast

    with pytest.raises(TypeError, match="device_type"):
        autocast(device_type="cuda", dtype=torch.float16)

    model, criterion, inputs, labels = toy()  # mended, in plain torch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with torch.amp.autocast(device_type="cpu", dtype=torch.float16):
        outputs = model(inputs)
        loss = criterion(outputs, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    want = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    model, criterion, inputs, labels = toy()  # the same with tilewright
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = tilewright.convert(model, FP16)
    scaler = DynamicScaler()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    scaler.scale(loss).backward()
    assert scaler.step(optimizer)
    scaler.update()
    got = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_environment_sample():
    """Sample 2, the variables of the environment.

    Wrong: the three exports share a line. The values are right.
    """
    for mode in ("hybrid", "pure_fp16", "bf16_mixed"):
        environ = {
            "DEEPSEEK_AMP_ENABLED": "1",
            "DEEPSEEK_LOSS_SCALE_WINDOW": "2000",
            "DEEPSEEK_PRECISION_MODE": mode,
        }
        section = load_recipe("default", environ=environ).recipe.precision
        assert (section.enabled, section.loss_scale_window, section.mode) == (True, 2000, mode)
        policy = Policy.from_section(section, "cpu")
        assert policy.mode == mode
        scaler = DynamicScaler.from_section(section, fp16=True, num_params=100)
        assert scaler is not None
        assert scaler.window == 2000
    off = load_recipe("default", environ={"DEEPSEEK_AMP_ENABLED": "0"}).recipe.precision
    assert Policy.from_section(off, "cpu").mode == "fp32"


class HybridPrecisionModel(nn.Module):
    """Sample 3 as printed, but for the autocast inside its forward."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(1024, 2048)
        self.linear2 = nn.Linear(2048, 1000)

    def forward(self, x):
        x = F.relu(self.linear1(x))
        return self.linear2(x)


def test_hybrid_model_sample():
    """Sample 3, a model adapted to mixed precision, with DeepSeekAdam.

    Wrong: this autocast belongs to CUDA alone (on a CPU it warns and computes in FP32), and inside forward it ties the
    model to one precision: evaluation in FP32, which the same article demands, cannot switch it off from outside.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = HybridPrecisionModel().to(device)
    first_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, labels = torch.randn(16, 1024, device=device), torch.randint(0, 1000, (16,), device=device)
    exact = model(x).detach()

    model = tilewright.convert(model, "hybrid")
    optimizer = DeepSeekAdam(model.parameters(), lr=1e-4)
    scaler = DynamicScaler(num_params=sum(parameter.numel() for parameter in model.parameters()))
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())

    model.load_state_dict(first_weights)
    assert not torch.equal(model(x), exact)
    with tilewright.evaluating(model):  # "evaluation: forced to FP32"
        assert torch.equal(model(x), exact)


def test_conv_fp16_batch_norm_fp32_embedding_fp16_attention_bf16():
    """Advice in section 3.3: vision with FP16 convolutions and FP32 batch norms; language with BF16 attention and FP16
    embeddings. As rules; the table says that each got what was asked for."""
    vision = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    rows = tilewright.explain(vision, Policy("fp32", (Rule(op="conv", compute="fp16"),)))
    assert [row.compute for row in rows[:2]] == ["fp16", "fp32"]

    config = tilewright.DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_layers=1)
    rules = (Rule(op="embedding", compute="fp16"), Rule(op="attention", compute="bf16"))
    rows = tilewright.explain(tilewright.Decoder(config), Policy("hybrid", rules))
    assert {row.op: row.compute for row in rows if row.op in ("embedding", "attention")} == {
        "embedding": "fp16",
        "attention": "bf16",
    }


def test_clipping_sample():
    """Sample 4, `clip_grad_norm_` with `max_norm=1.0, clip_threshold=1e5`.

    Wrong: torch's function has no clip_threshold. Ours skips a step above it, like an overflow.
    """
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 3.0)
    with pytest.raises(TypeError, match="clip_threshold"):
        torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0, clip_threshold=1e5)

    twin = nn.Parameter(torch.zeros(4))
    twin.grad = weight.grad.clone()
    torch.nn.utils.clip_grad_norm_([twin], max_norm=1.0)
    clip = GradClip(max_norm=1.0, threshold=1e5)
    result = clip([weight])
    assert result.norm == pytest.approx(6.0)
    torch.testing.assert_close(weight.grad, twin.grad)
    weight.grad = torch.full((4,), 1e6)
    assert "above clip_threshold" in clip([weight]).skip


def test_checkpointing_and_micro_batch_sample(tmp_path):
    """Sample 5, `model.gradient_checkpointing_enable()` and `per_device_train_batch_size=8,
    gradient_accumulation_steps=4`, in the Trainer that these names belong to.

    Wrong: nothing, but the first is a method of transformers' models only; ours take `activation_checkpoint`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from tilewright.integrations.transformers import attach

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, use_cache=False))
    model.gradient_checkpointing_enable()
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": (ids := torch.randint(0, 50, (8,))), "labels": ids} for _ in range(64)]
    trainer = Trainer(model, args, train_dataset=rows)
    attach(trainer, "bf16_mixed")
    assert trainer.train().training_loss == pytest.approx(3.9, abs=0.3)

    config = tilewright.DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_layers=1)
    decoder = tilewright.Decoder(config)
    decoder.activation_checkpoint = "full"
    assert decoder.blocks[0].activation_checkpoint == "full"


def test_forced_fp32_sample():
    """Sample 6, `torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)`.

    Wrong: deprecated in favour of `torch.amp.custom_fwd(device_type=...)`; and it decorates the forward of an
    autograd.Function, so it is of no use for layers and functions that one did not write.
    """

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2

    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        assert Double.apply(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


def test_fp32_ops_sample():
    """Sample 7, `DEEPSEEK_FP32_OPS="layer_norm,softmax"`: right as printed."""
    section = load_recipe("default", environ={"DEEPSEEK_FP32_OPS": "layer_norm,softmax"}).recipe.precision
    policy = Policy.from_section(section, "cpu")
    assert policy.fp32_ops == ("layer_norm", "softmax")
    model = tilewright.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1)), policy)
    rows = {row.op: row.compute for row in model.precision_report.rows}
    assert (rows["norm"], rows["softmax"]) == ("fp32", "fp32")
    assert model.precision_report.unmatched == ()
    assert model(torch.ones(1, 8)).sum().item() == pytest.approx(1.0, abs=1e-2)
