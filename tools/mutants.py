"""Mutation tests on a drawn sample: change one operator or constant, run the package's tests, print what survives.

`make mutants`, or `make mutants ARGS="--count 60 --seed 7 --package planner --package memory"`. The changes are
those of cosmic-ray's operators. A function is drawn first, then a kind of change in it, then the change: neither long
functions nor operators with many replacements dominate the sample. Each change is made in a copy of the repository, and
tested by tests/PACKAGE with -x, the files that import the changed module first; where none of them does, with the files
of other folders that do.

A survivor shows a missing test, or changes nothing that a caller sees: a person decides. Triton's kernels are left out:
their interpreter is too slow.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "formats", "memory", "ops", "optim", "planner")
# The first two need arguments; the others swap `is` and `==`, which seldom changes what is computed.
NO_OPERATORS = (
    *("VariableReplacer", "VariableInserter", "Operator_Is_Eq", "Operator_IsNot_NotEq"),
    *("Operator_Eq_Is", "Operator_NotEq_IsNot"),
)
MEMORY_LIMIT_GIB = 16
# The limit holds in the process of the tests and its children: a changed size may ask for any amount of memory.
RUN_PYTEST = f"""
import resource, sys, pytest
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_LIMIT_GIB} * 2**30,) * 2)
sys.exit(pytest.main(sys.argv[1:]))
"""
MARKERS = (
    "not slow and not gpu and not dist"  # several processes: slower, and one that ends for another reason is no kill
)
KILLED, SURVIVED, TIMED_OUT, NOT_RUN = "killed", "survived", "timed out", "not run"


@dataclass(frozen=True)
class Function:
    path: str  # below the root
    name: str
    first: int  # lines of the body, without the docstring
    last: int

    @property
    def package(self) -> str:
        return Path(self.path).parts[2]


@dataclass(frozen=True)
class Mutant:
    function: Function
    operator: str
    occurrence: int
    source: str
    changed: str

    @property
    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.source.splitlines(), self.changed.splitlines(), self.function.path, self.operator, lineterm="", n=2
        )
        return "\n".join(lines)


@cache
def operators() -> dict[str, object]:
    """Operator by name, without those that need arguments."""
    names = [name for name in operator_names() if not name.endswith(NO_OPERATORS)]
    return {name: get_operator(name)() for name in sorted(names)}


def functions_of(path: str) -> list[Function]:
    """Functions and methods of a file, those inside functions as part of them."""
    found = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                if code:
                    found.append(Function(path, prefix + node.name, code[0].lineno, node.end_lineno))

    visit(ast.parse((ROOT / path).read_text()).body, "")
    return found


@cache
def changes_of(path: str) -> dict[str, list[tuple[int, int]]]:
    """(line, occurrence) of each change of a file, by operator."""
    nodes = list(ast_nodes(get_ast((ROOT / path).read_text())))
    return {
        name: [
            (start[0], occurrence)
            for occurrence, (start, _) in enumerate(
                place for node in nodes for place in operator.mutation_positions(node)
            )
        ]
        for name, operator in operators().items()
    }


def draw_mutant(function: Function, generator: random.Random) -> Mutant | None:
    """One change inside the function, or None where no operator applies."""
    kinds = defaultdict(list)
    for name, changes in changes_of(function.path).items():
        inside = [(name, occurrence) for line, occurrence in changes if function.first <= line <= function.last]
        kinds[name.partition("_")[0]] += inside
    kinds = {kind: inside for kind, inside in kinds.items() if inside}
    if not kinds:
        return None
    name, occurrence = generator.choice(kinds[generator.choice(sorted(kinds))])
    source = (ROOT / function.path).read_text()
    return Mutant(function, name, occurrence, source, mutate_code(source, operators()[name], occurrence))


def draw_mutants(packages: list[str], number: int, seed: int) -> list[Mutant]:
    files = [path for package in packages for path in sorted((ROOT / "src/tilewright" / package).rglob("*.py"))]
    paths = [str(path.relative_to(ROOT)) for path in files if "triton" not in path.parts]
    functions = [function for path in paths for function in functions_of(path)]
    generator = random.Random(seed)
    generator.shuffle(functions)
    drawn = filter(None, (draw_mutant(function, generator) for function in functions))
    return [mutant for mutant, _ in zip(drawn, range(number), strict=False)]


def copy_repository(folder: Path) -> Path:
    """Files that git has or would add: a test may read any of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for path in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def run_tests(folder: Path, package: str, module: str, limit_s: float) -> int | None:
    """Exit status of pytest in the folder; None after limit_s seconds. `module` may be empty: no file goes first."""
    tests = sorted((folder / "tests" / package).rglob("test_*.py"))
    naming = [path for path in sorted((folder / "tests").rglob("test_*.py")) if module and module in path.read_text()]
    first = [path for path in tests if path in naming] or naming
    tests = [*first, *(path for path in tests if path not in first)]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_PYTEST, "-x", "-q", "-p", "no:cacheprovider", "-m", MARKERS, *map(str, tests)],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def test_mutant(folder: Path, mutant: Mutant, limit_s: float) -> str:
    """Tests the change in a copy of the repository, and undoes it."""
    path = folder / mutant.function.path
    # Compiled code is found by the time of its source in whole seconds: two changes may share one.
    compiled = Path(cache_from_source(str(path)))
    path.write_text(mutant.changed)
    compiled.unlink(missing_ok=True)
    module = mutant.function.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    try:
        status = run_tests(folder, mutant.function.package, module, limit_s)
    finally:
        path.write_text(mutant.source)
        compiled.unlink(missing_ok=True)
    return {0: SURVIVED, None: TIMED_OUT}.get(status, KILLED)


def run_all(mutants: list[Mutant], jobs: int, minutes: float) -> list[str]:
    """What became of each mutant."""
    end, number = time.monotonic() + 60 * minutes, count(1)
    folders: SimpleQueue[Path] = SimpleQueue()

    def seconds_unchanged(package: str) -> float:
        folder = folders.get()
        try:
            for _ in range(2):  # a test with a time limit may fail once on a busy machine
                start = time.monotonic()
                if run_tests(folder, package, "", 60 * minutes) == 0:
                    return time.monotonic() - start
            sys.exit(f"tests/{package} fails without any change: run it with pytest first")
        finally:
            folders.put(folder)

    def judge(mutant: Mutant) -> str:
        limit_s = 180 + 1.5 * unchanged[mutant.function.package]
        folder, start = folders.get(), time.monotonic()
        outcome = NOT_RUN if start > end else test_mutant(folder, mutant, limit_s)
        folders.put(folder)
        where = f"{mutant.function.path.removeprefix('src/tilewright/')} {mutant.function.name}"
        print(f"{next(number):3}/{len(mutants)}  {outcome:9}  {time.monotonic() - start:4.0f} s  {where}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            folders.put(copy_repository(Path(place) / str(job)))
        packages = sorted({mutant.function.package for mutant in mutants})
        unchanged = dict(zip(packages, pool.map(seconds_unchanged, packages), strict=True))
        print("seconds without a change: ", ", ".join(f"{name} {unchanged[name]:.0f}" for name in packages), flush=True)
        return list(pool.map(judge, mutants))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=30, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of the draw (default: any)")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="package to draw from (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants that are tested at the same time")
    parser.add_argument("--minutes", type=float, default=20.0, help="no mutant is started after so many minutes")
    arguments = parser.parse_args()
    packages = sorted(arguments.package or PACKAGES)
    print(f"{arguments.count} mutants of {', '.join(packages)}; seed {arguments.seed}", flush=True)
    mutants = draw_mutants(packages, arguments.count, arguments.seed)
    outcomes = run_all(mutants, arguments.jobs, arguments.minutes)
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome == SURVIVED:
            print(f"\nsurvived, in {mutant.function.name}:\n{mutant.diff}")
    run = len(outcomes) - outcomes.count(NOT_RUN)
    killed = run - outcomes.count(SURVIVED)
    print(f"\nseed {arguments.seed}: {killed} of {run} killed ({killed / max(run, 1):.0%})", end="")
    print(f", {outcomes.count(TIMED_OUT)} of them by time; {outcomes.count(NOT_RUN)} not run")


if __name__ == "__main__":
    main()
