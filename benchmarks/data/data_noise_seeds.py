"""The noise filter of a data build over seeds: how much planted noise goes, and how much else.

The corpus is that of `benchmarks.data.data_scores`. A seed draws which texts are the clean reference, which of the
others become noise and what noise; the rest stays. Two builds a seed: with the reference, and with the corpus itself as
one. Shares are of records. Of the kind `scrambled` nothing is trained on; recall is the mean of the others.

python -m benchmarks.data.data_noise_seeds [--seeds 8]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import spread, write_result
from benchmarks.data.data_scores import CLEAN, MAKERS, dropped, settings, write_corpus
from tilewright.data.common.progress import ProgressBar
from tilewright.data.engine.executors.local_processes import LocalExecutor
from tilewright.data.engine.run import build_dataset

CLAIM = "the noise filter removes 75 % and more of planted noise, whatever the seed, and loses few clean texts"


def of_seed(seed: int) -> dict[str, dict[str, Any]]:
    """What the filter drops of the corpus that a seed draws, by what it learns from."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, seed)
        for title, clean in (("clean text given", str(folder / "good")), ("clean = corpus", "corpus")):
            out = folder / f"out{len(found)}"
            with ProgressBar(f"seed {seed}, {title}") as progress:
                build_dataset(settings(folder, noise={"clean": clean}), out, LocalExecutor(1), progress)
            found[title] = dropped(out, "noise", folder / "in")
    return found


def main() -> None:
    """Measure all seeds, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    by_title: dict[str, list[dict[str, Any]]] = {}
    for seed in range(args.seeds):
        for title, found in of_seed(seed).items():
            by_title.setdefault(title, []).append(found)
            print(f"seed {seed}, {title}: {found['recall']} of the noise, {found['lost']} of the rest", flush=True)
    results = {
        title: {
            "recall": spread([one["recall"] for one in found]),
            "lost": spread([one["lost"] for one in found]),
            "records": {kind: found[0]["kinds"][kind]["records"] for kind in (CLEAN, *MAKERS)},
            "dropped": {kind: spread([one["kinds"][kind]["dropped"] for one in found]) for kind in (CLEAN, *MAKERS)},
        }
        for title, found in by_title.items()
    }
    write_result("data_noise_seeds", CLAIM, {"seeds": args.seeds, "noise": results})


if __name__ == "__main__":
    main()
