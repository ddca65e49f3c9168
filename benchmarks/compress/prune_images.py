"""ResNets that classify images with half of all channels cut, which leaves a quarter of the parameters: before anything
is trained, recovered, and the small shape from random weights, beside the run that got the same further steps.

Two sets of images: scikit-learn's digits, five splits with a fifth held out each, and 62 glyphs of matplotlib's text
fonts in a folder (`mpl-data/fonts/ttf` of its wheel), turned, moved and scaled at random, one split. Rises are
percentage points of held-out images, of all of them, with the standard error of differences. The file is written after
each split; the same command continues in its folder.

python -m benchmarks.compress.prune_images --work FOLDER [--teacher-steps 300] [--steps 200] [--splits 5]
    [--fonts FOLDER [--glyph-steps 1200] [--glyph-recovery 1200] [--glyph-batch 32]]
"""

import random
import re
import string
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import parser_of, write_result
from benchmarks.compress.prune_stages import Study
from tilewright.compress.budget.held_out_rise import parameters, row_losses_of
from tilewright.compress.prune.batch_norms import estimate_norms
from tilewright.compress.prune.prune import prune

CLAIM = "a ResNet has a quarter of its parameters within 0.8 points of held-out images, digits and glyphs"
SIZE, SHARE, BATCH = 32, 0.5, 32
GLYPHS, IMAGES = string.ascii_letters + string.digits, 20_000
NET = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], "layer_type": "basic"}
TEXT = re.compile(r"(DejaVuS(ans|erif)(Mono)?(-\w+)?|STIXGeneral\w*|cm(b|r|ss|tt)10)\.ttf")
"""Names of fonts with all glyphs: others have symbols, or a box for each letter."""
_SCALE = 255 / 16


def digits(folder: Path, split: int) -> None:
    """One image per file; names decide which are held out, so each split has its own."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        path = folder / str(label) / f"{split}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * _SCALE).astype("uint8")).save(path)


def glyphs(folder: Path, fonts: Path, seed: int) -> None:
    """Letters and digits of text fonts, each image another position, size and angle."""
    from PIL import Image, ImageDraw, ImageFont

    rng, faces = random.Random(seed), sorted(path for path in fonts.rglob("*.ttf") if TEXT.fullmatch(path.name))
    for number in range(IMAGES):
        glyph = GLYPHS[number % len(GLYPHS)]
        font = ImageFont.truetype(str(rng.choice(faces)), rng.randint(18, 26))
        image = Image.new("L", (SIZE, SIZE))
        at = (SIZE / 2 + rng.uniform(-3, 3), SIZE / 2 + rng.uniform(-3, 3))
        ImageDraw.Draw(image).text(at, glyph, fill=rng.randint(120, 255), font=font, anchor="mm")
        path = folder / f"{GLYPHS.index(glyph):02d}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.rotate(rng.uniform(-15, 15)).save(path)


def studied(
    folder: Path, images: Path, classes: int, teacher_steps: int, steps: int, seed: int, batch: int = BATCH
) -> Study:
    """The run on a folder of images."""
    from transformers import ResNetConfig

    net = ResNetConfig(**NET, num_labels=classes)
    net.architectures = ["ResNetForImageClassification"]
    net.save_pretrained(folder / "net")
    settings = {
        "model.kind": "hf", "model.path": folder / "net", "model.task": "image_classification",
        "data.source": images, "data.image_size": SIZE, "data.holdout": 0.2, "run.seed": seed,
        "train.steps": teacher_steps, "train.global_batch_size": batch, "train.micro_batch_size": batch,
        "train.compile": "off", "train.eval_interval": 0, "train.eval_batches": 6400 // batch, "precision.mode": "fp32",
        "optim.lr": 3e-3, "log.report": False, "energy.idle_seconds": 0, "run.threads": 1, "checkpoint.interval": 50,
    }  # fmt: skip
    return Study.of_settings(folder, steps, settings)


def of_study(study: Study) -> dict[str, Any]:
    """Points of the cut, with statistics of batch norms measured again, with fits too, of its recovery, and of its
    shape from random weights."""
    model = study.source.model
    plain, made = (prune(model, {"channels": SHARE}, batches=study.seen, refit=refit).model for refit in (False, True))
    found: dict[str, Any] = {"parameters": [parameters(model), parameters(made)]}
    found["cut"], found["fitted"] = (study.rises(row_losses_of(one, study.batches)) for one in (plain, made))
    estimate_norms(plain, study.seen)
    found["norms"] = study.rises(row_losses_of(plain, study.batches))
    found["recovered"] = study.rises(study.trained("recovered", made, taught=False))
    found["from random weights"] = study.rises(study.from_random("scratch", made))
    return found


def cases(args: Namespace) -> Iterator[tuple[str, Study]]:
    """All splits of both sets."""
    for split in range(args.splits):
        folder = args.work / f"digits-{split}"
        if not (images := folder / "images").is_dir():
            digits(images, split)
        yield f"digits {split}", studied(folder, images, 10, args.teacher_steps, args.steps, split)
    if args.fonts is not None:
        folder = args.work / "glyphs"
        if not (images := folder / "images").is_dir():
            glyphs(images, args.fonts, 0)
        yield "glyphs", studied(folder, images, len(GLYPHS), args.glyph_steps, args.glyph_recovery, 0, args.glyph_batch)


def main() -> None:
    """Measure, and write the result."""
    parser = parser_of(
        __doc__, teacher_steps=300, steps=200, splits=5, glyph_steps=1200, glyph_recovery=1200, glyph_batch=BATCH
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--fonts", type=Path, help="folder of matplotlib's .ttf files; without it no glyphs")
    args = parser.parse_args()
    facts = {"teacher_steps": args.teacher_steps, "steps": args.steps, "share": SHARE, "net": NET, "size": SIZE}
    facts |= {"glyph_steps": args.glyph_steps, "glyph_batch": args.glyph_batch, "glyph_recovery": args.glyph_recovery}
    found: dict[str, Any] = {}
    for name, study in cases(args):
        found[name] = {"teacher": study.case("teacher", study.facts)} | study.case(
            "half", lambda study=study: of_study(study)
        )
        write_result("prune_images", CLAIM, facts | {"cases": found})


if __name__ == "__main__":
    main()
