"""Runs of the command line on the zoo's families: data, a folder with a config, settings, and what a run leaves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.contracts.observe import write_texts
from tests.training.tiny import last_state
from tests.zoo.families import IMAGE, VOCAB, Family
from tilewright.cli.app import CliState, cli
from tilewright.data.common.tokenizer import train_tokenizer

SETTINGS = {
    "run.device": "cpu", "run.threads": "1", "run.dir": "runs", "run.name": "zoo", "model.kind": "hf",
    "model.path": "model", "data.seq_len": "32", "data.image_size": str(IMAGE),
    "data.prefetch": "0", "train.steps": "2", "train.global_batch_size": "4", "train.micro_batch_size": "2",
    "train.compile": "off", "train.eval_interval": "0", "train.eval_batches": "1", "train.sample_tokens": "0",
    "optim.warmup_steps": "0", "checkpoint.interval_minutes": "0", "checkpoint.export_hf": "true",
    "log.report": "false",
    "ops.cross_entropy": "ref", "ops.adam": "ref",
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Texts, images of two classes, and a tokenizer that the zoo's models have embeddings for."""
    from PIL import Image

    write_texts(folder / "texts")
    texts = [path.read_text() for path in sorted((folder / "texts").rglob("*.txt"))]
    train_tokenizer(texts, VOCAB).save(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    for name, base in (("dark", 40), ("light", 200)):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(12):
            pixels = (base + 30 * torch.randn(IMAGE, IMAGE, 3, generator=generator)).clamp(0, 255).byte().numpy()
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")


def settings(family: Family, data: Path, **changes: str) -> dict[str, str]:
    """A run's settings, with `changes` as section__field=value."""
    images = family.task == "image_classification"
    source = {"data.source": str(data / ("images" if images else "texts")), "data.cache_dir": str(data / "cache")}
    tokenizer = {} if images else {"data.tokenizer": str(data / "tokenizer")}
    values = SETTINGS | source | tokenizer | {"model.task": str(family.task)}
    return values | {name.replace("__", "."): value for name, value in changes.items()}


def typed(values: Mapping[str, str]) -> list[str]:
    """Settings as arguments of a command."""
    return [part for name, value in values.items() for part in (f"--{name}", value)]


def train(family: Family, data: Path, **changes: str) -> None:
    """`tilewright train` on a family in the present folder; an error is raised, not printed."""
    family.config().save_pretrained("model")
    arguments = typed(settings(family, data, **changes))
    cli.main(["train", *arguments], prog_name="tilewright", standalone_mode=False, obj=CliState())


def trained(family: Family) -> nn.Module:
    """The transformers model with the weights of the run's last checkpoint."""
    net = family.model().net
    tensors, _ = last_state(Path("runs/zoo"))
    state = {name.removeprefix("model.net."): t for name, t in tensors.items() if name.startswith("model.net.")}
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert not unexpected
    tied = {name for name, _ in net.named_parameters(remove_duplicate=False)} - {n for n, _ in net.named_parameters()}
    assert set(missing) <= tied, f"not in the checkpoint: {missing}"
    return net.eval()


def logits(family: Family, net: nn.Module) -> torch.Tensor:
    """What a model says to a batch."""
    inputs = {name: tensor for name, tensor in family.inputs().items() if name != "labels"}
    with torch.no_grad():
        return net(**inputs).logits


def events(kind: str) -> list[dict]:
    """The run's events of a kind."""
    rows = map(json.loads, Path("runs/zoo/events.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def auto_class(family: Family) -> Any:
    """The class of transformers that reads a folder of this family."""
    import transformers

    names = {"causal_lm": "AutoModelForCausalLM", "masked_lm": "AutoModelForMaskedLM"}
    return getattr(transformers, names.get(str(family.task), "AutoModelForImageClassification"))
