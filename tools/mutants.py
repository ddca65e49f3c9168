"""Mutation tests on a drawn sample: change one operator or constant, run the nearest tests, print what survives.

`make mutants`, or `make mutants ARGS="--count 60 --seed 7 --package planner --package memory"`. The changes are
those of cosmic-ray's operators. A function is drawn first, then a kind of change in it, then the change: neither long
functions nor operators with many replacements dominate the sample. Each change is made in a copy of the repository, and
tested with -x by the files that are nearest to it: those that import the changed module, then those that import one
that imports it, and so on, in each step those of the same folder first; and those that name what the function names,
above all what few tests name. A test that fails is run once more without the
change: one that fails then, too, kills nothing.

A survivor shows a missing test, or changes nothing that a caller sees: a person decides. Triton's kernels are left out:
their interpreter is too slow.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
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
SOURCE = ROOT / "src" / "tilewright"
PACKAGES = sorted(folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists())
NEAREST, NAMING = 8, 4
"""Files of tests that a change is tested by, at most: the nearest by imports, and others that name what the function
names."""
# The first two need arguments; the others swap `is` and `==`, which seldom changes what is computed.
NO_OPERATORS = (
    *("VariableReplacer", "VariableInserter", "Operator_Is_Eq", "Operator_IsNot_NotEq"),
    *("Operator_Eq_Is", "Operator_NotEq_IsNot"),
)
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
MEMORY_LIMIT_GIB = 16
TEST_LIMIT_S = 120  # a change that makes a test wait for ever is found by it
# The limit holds in the process of the tests and its children: a changed size may ask for any amount of memory.
RUN_PYTEST = f"""
import resource, sys, pytest
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_LIMIT_GIB} * 2**30,) * 2)
sys.exit(pytest.main(sys.argv[1:]))
"""
MARKERS = "not slow and not gpu"
KILLED, SURVIVED, LATE, UNSURE, NOT_RUN = "killed", "survived", "out of time", "fails without it", "not run"


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


def modules_in(path: Path) -> set[str]:
    """Dotted names of tilewright that a file imports, and of what it imports from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("tilewright")}


@cache
def imports(folder: str) -> dict[Path, set[str]]:
    """What each Python file below a folder of the repository imports of tilewright."""
    return {path.relative_to(ROOT): modules_in(path) for path in sorted((ROOT / folder).rglob("*.py"))}


def module_of(path: str | Path) -> str:
    """The dotted name of a source file."""
    return str(path).removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def nearest_tests(path: str) -> list[str]:
    """The test files that are nearest to a source file by imports, at most `NEAREST`."""
    tests = {file: names for file, names in imports("tests").items() if file.name.startswith("test_")}
    folder = Path(path).parent.relative_to("src/tilewright").parts
    level, known, found = {module_of(path)}, {module_of(path)}, []

    def strangeness(test: Path) -> tuple[int, str]:
        own = test.parent.parts[1:]
        return -sum(a == b for a, b in zip(own, folder, strict=False)), str(test)

    while level and len(found) < NEAREST:
        found += sorted((file for file, names in tests.items() if names & level and file not in found), key=strangeness)
        level = {module_of(file) for file, names in imports("src").items() if names & level} - known
        known |= level
    return [str(file) for file in found[:NEAREST]]


@cache
def words_of_tests() -> dict[str, set[str]]:
    """The words of each test file."""
    files = [file for file in imports("tests") if file.name.startswith("test_")]
    return {str(file): set(WORD.findall((ROOT / file).read_text())) for file in files}


def naming_tests(function: Function) -> list[str]:
    """Test files that name what a function names (names, keys, files): a word counts the more the fewer tests have
    it."""
    body = (ROOT / function.path).read_text().splitlines()[function.first - 1 : function.last]
    words = set(WORD.findall("\n".join(body))) | set(function.name.split("."))
    found: dict[str, float] = defaultdict(float)
    for word in words:
        having = [file for file, theirs in words_of_tests().items() if word in theirs]
        for file in having:
            found[file] += 1 / len(having)
    return sorted(found, key=lambda file: (-found[file], file))


def tests_of(function: Function) -> list[str]:
    """The test files that a change of a function is tested by."""
    nearest = nearest_tests(function.path)
    return [*nearest, *[file for file in naming_tests(function) if file not in nearest][:NAMING]]


def run_tests(folder: Path, tests: list[str], limit_s: float) -> int | None:
    """Exit status of pytest in the folder; None after limit_s seconds."""
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-n0", "--timeout", str(TEST_LIMIT_S), "-o", "cache_dir=.mutants", "-m", MARKERS]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_PYTEST, *options, *tests],
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
    path, cached = folder / mutant.function.path, folder / ".mutants"
    # Compiled code is found by the time of its source in whole seconds: two changes may share one.
    compiled = Path(cache_from_source(str(path)))
    shutil.rmtree(cached, ignore_errors=True)
    path.write_text(mutant.changed)
    compiled.unlink(missing_ok=True)
    try:
        status = run_tests(folder, tests_of(mutant.function), limit_s)
    finally:
        path.write_text(mutant.source)
        compiled.unlink(missing_ok=True)
    if status in (0, 5):  # 5: no test was selected
        return SURVIVED
    if status is None:
        return LATE
    failed = list(json.loads((cached / "v/cache/lastfailed").read_text())) if status == 1 else []
    return UNSURE if failed and run_tests(folder, failed, limit_s) != 0 else KILLED


def run_all(mutants: list[Mutant], jobs: int, minutes: float, limit_s: float) -> list[str]:
    """What became of each mutant."""
    end, number = time.monotonic() + 60 * minutes, count(1)
    folders: SimpleQueue[Path] = SimpleQueue()

    def judge(mutant: Mutant) -> str:
        folder, start = folders.get(), time.monotonic()
        outcome = NOT_RUN if start > end else test_mutant(folder, mutant, limit_s)
        folders.put(folder)
        where = f"{mutant.function.path.removeprefix('src/tilewright/')} {mutant.function.name}"
        print(f"{next(number):3}/{len(mutants)}  {outcome:16}  {time.monotonic() - start:4.0f} s  {where}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            folders.put(copy_repository(Path(place) / str(job)))
        return list(pool.map(judge, mutants))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=30, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of the draw (default: any)")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="package to draw from (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants that are tested at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, help="no mutant is started after so many minutes")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for the tests of one mutant")
    arguments = parser.parse_args()
    packages = sorted(arguments.package or PACKAGES)
    print(f"{arguments.count} mutants of {', '.join(packages)}; seed {arguments.seed}", flush=True)
    mutants = draw_mutants(packages, arguments.count, arguments.seed)
    outcomes = run_all(mutants, arguments.jobs, arguments.minutes, arguments.limit)
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome in (SURVIVED, LATE):
            print(f"\n{outcome}, in {mutant.function.name}:\n{mutant.diff}")
    judged = [outcome for outcome in outcomes if outcome not in (UNSURE, NOT_RUN)]
    killed = judged.count(KILLED)
    print(f"\nseed {arguments.seed}: {killed} of {len(judged)} killed ({killed / max(len(judged), 1):.0%})", end="")
    print(f"; {outcomes.count(UNSURE)} by tests that fail without it, {outcomes.count(NOT_RUN)} not run")


if __name__ == "__main__":
    main()
