"""What `plan --world 256` takes of a core and of memory, and whether it answers the same twice.

Each command runs in a process of its own with one thread; processor seconds and the greatest resident set are those of
this process and of those that it starts (one makes the tables of schedules).

python -m benchmarks.plans.mesh_search
"""

import json
import os
import resource
import subprocess
import sys
from typing import Any

from benchmarks.common import parser_of, write_result

CLAIM = "plan --world 256 of 70B and of a 671B mixture: at most 60 s of one core and 2 GiB, the same answer twice"
RECIPES = ("dense_70b", "moe_671b")
TIMES = 2
SECONDS, GIB = 60.0, 2.0


def measured(recipe: str) -> dict[str, Any]:
    """One command."""
    command = [sys.executable, "-m", "tilewright", "plan", recipe, "--world", "256", "--on", "h100", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(seconds, 2), "peak_gib": after.ru_maxrss / 2**20, "answer": json.loads(done.stdout)}


def main() -> None:
    """Both recipes, each twice."""
    parser_of(__doc__).parse_args()
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        runs = [measured(recipe) for _ in range(TIMES)]
        answers = [run.pop("answer") for run in runs]
        found[recipe] = {
            "runs": runs,
            "same": all(answer == answers[0] for answer in answers),
            "settings": answers[0]["settings"],
            "simulated": answers[0]["simulated"],
            "best": answers[0]["best"][0],
            "kept": max(run["cpu_s"] for run in runs) <= SECONDS and max(run["peak_gib"] for run in runs) <= GIB,
        }
        print(recipe, runs, found[recipe]["same"], found[recipe]["kept"], flush=True)
    write_result("mesh_search", CLAIM, found, arguments=())


if __name__ == "__main__":
    main()
