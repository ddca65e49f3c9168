"""Data builds that are killed hard (SIGKILL) again and again at random moments: is the dataset the same, byte for byte?

python -m benchmarks.data.data_kills --kills 50

Each start of a build draws how it runs (1, 2 or 4 processes, or two ranks) and when it is killed, uniformly in the wall
time of an undisturbed build of its kind. Half of the kills take all processes at once; the others take the first one,
which leaves its workers to find out, or one rank and the other half a second later. The next start follows at once.
Where a build ends before its kill, its dataset is compared with the undisturbed one, and the next begins. At every kill
and at the end, no finished unit may have been written again. Kills are kept in results/data_kills_runs.jsonl as they
happen; the command goes on where it was.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_result
from benchmarks.data.data_stages import build_command, write_toml
from benchmarks.data.data_texts import MB, write_shards
from benchmarks.kept_rows import KeptRows

CLAIM = "data builds killed at random moments give the dataset of an undisturbed one, and no finished unit runs again"
ROWS = KeptRows(RESULTS / "data_kills_runs.jsonl")
KINDS = {"1 process": 1, "2 processes": 2, "4 processes": 4, "2 ranks": 0}
PARTS = ("records", "rejects", "tokens")
INPUT_BYTES = 3 * MB // 2
Units = dict[Path, int]


class Build:
    """A build that runs: one process and its workers, or two ranks; each in a process group of its own."""

    def __init__(self, kind: str, toml: Path, out: Path):
        self.logs = [out.with_name(f"{out.name}.{rank}.log") for rank in range(1 if KINDS[kind] else 2)]
        command = build_command(toml, out, KINDS[kind])
        environments: list[dict[str, str]] = [{}]
        if not KINDS[kind]:
            command = [*command[: command.index("--processes")], "--executor", "rank"]
            environments = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        self.processes = []
        for more, log in zip(environments, self.logs, strict=True):
            with log.open("w") as file:
                env = os.environ | more
                self.processes.append(
                    subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
                )

    def ends_before(self, seconds: float | None) -> bool:
        """Whether all processes end within `seconds`.

        Raises:
            SystemExit: one of them failed.
        """
        stop = None if seconds is None else time.monotonic() + seconds
        for process, log in zip(self.processes, self.logs, strict=True):
            try:
                process.wait(None if stop is None else max(0.0, stop - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
            if process.returncode:
                raise SystemExit(f"a build ended with code {process.returncode}: {log.read_text()[-3000:]}")
        return True

    def kill(self, draw: random.Random) -> str:
        """Kill it in one of two ways, which it returns."""
        if draw.random() < 0.5:
            for process in self.processes:
                os.killpg(process.pid, signal.SIGKILL)
            way = "all"
        else:
            order = draw.sample(self.processes, len(self.processes))
            order[0].kill()
            for process in order[1:]:
                time.sleep(0.5)
                process.kill()
            way = "first"
        for process in self.processes:
            process.wait()
        return way


def finished_units(out: Path) -> Units:
    """When each finished unit was written."""
    found = {}
    for receipt in out.glob("work/*/*/receipt.json"):
        if receipt.parent.name.isdigit():
            found[receipt] = receipt.stat().st_mtime_ns
    return found


def written_again(before: Units, now: Units) -> list[str]:
    """Units that were finished before and are gone or newer now."""
    return sorted(f"{path.parts[-3]} {path.parts[-2]}" for path, at in before.items() if now.get(path) != at)


def digest(out: Path) -> str:
    """Of all bytes of a dataset, names included."""
    files = sorted(path for part in PARTS for path in (out / part).rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in [*files, out / "dataset.json", out / "README.md"]:
        whole.update(path.relative_to(out).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def undisturbed(toml: Path, folder: Path) -> tuple[str, dict[str, float]]:
    """The dataset's digest, and the seconds of a build of each kind.

    Raises:
        SystemExit: kinds differ without any kill.
    """
    seconds, digests = {}, set()
    for kind in KINDS:
        began = time.monotonic()
        Build(kind, toml, folder / "whole").ends_before(None)
        seconds[kind] = time.monotonic() - began
        digests.add(digest(folder / "whole"))
        shutil.rmtree(folder / "whole")
        print(f"{kind}: {seconds[kind]:.1f} s", flush=True)
    if len(digests) > 1:
        raise SystemExit(f"kinds of builds differ: {digests}")
    return digests.pop(), seconds


def main() -> None:
    """Kill, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data-kills-") as name:
        folder = Path(name)
        write_shards(folder / "in", INPUT_BYTES, INPUT_BYTES // 4, base_bytes=2 * INPUT_BYTES)
        toml, out = folder / "data.toml", folder / "out"
        read = {"source": str(folder / "in"), "shard_bytes": 1 << 17}
        write_toml(toml, read=read, tokenizer={"vocab_size": 1000}, rules={"min_words": 20})
        wanted, seconds = undisturbed(toml, folder)
        known: Units = {}
        while sum("way" in row for row in ROWS.all()) < args.kills or out.exists():
            past = ROWS.all()
            draw = random.Random(len(past))
            kind = draw.choice(list(KINDS))
            is_last = sum("way" in row for row in past) >= args.kills
            at_s = draw.uniform(0, seconds[kind])
            build = Build(kind, toml, out)
            row: dict[str, Any] = {"kind": kind}
            if build.ends_before(None if is_last else at_s):
                row |= {"same": digest(out) == wanted}
            else:
                row |= {"at_s": round(at_s, 2), "way": build.kill(draw)}
            now = finished_units(out)
            row |= {"finished": len(now), "again": written_again(known, now)}
            known = now
            ROWS.add(row)
            if "same" in row:
                shutil.rmtree(out)
                known = {}
        units = max(row["finished"] for row in ROWS.all())
    write_result("data_kills", CLAIM, summed(ROWS.all()) | {"units": units, "undisturbed_s": seconds})


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Kills by kind and way, builds that ended and how many of them are the same, units that were written again."""
    kills = [row for row in rows if "way" in row]
    ended = [row for row in rows if "same" in row]
    return {
        "kills": len(kills),
        "kills_by_kind": {kind: sum(row["kind"] == kind for row in kills) for kind in KINDS},
        "kills_by_way": {way: sum(row["way"] == way for row in kills) for way in ("all", "first")},
        "kills_with_finished_units": sum(row["finished"] > 0 for row in kills),
        "builds": len(ended),
        "builds_with_equal_bytes": sum(row["same"] for row in ended),
        "units_written_again": sum(len(row["again"]) for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
