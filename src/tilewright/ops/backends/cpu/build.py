"""Compiles the C++ files of `cpp`, each once per machine when first used, and loads them.

A library is in the user's cache folder under a name made from the source, the flags, the compiler and the processor,
so a change of any of them builds a new one. Two processes that build at once do no harm: each writes a file of its own
and renames it. What goes wrong is a reason for `why_not`, not an exception.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tilewright.core.hardware import Machine, cpu_features, find_cxx_compiler
from tilewright.ops.base.dispatch import Case

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fwrapv", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-shared", "-Wno-psabi"),
)
_FOLDER = Path(__file__).parent / "cpp"
_BUILD_SECONDS = 120
_OPENMP_NAMES = ("libgomp", "libomp", "libiomp5")
_OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_Signature = tuple[type | None, list[type]]


class BuildError(Exception):
    """The library cannot be had here. The text says why, in a few words."""


@dataclass(frozen=True, eq=False)
class Library:
    """The library of one source file of `cpp`.

    Args:
        name: of the file, without its ending.
        signatures: result and arguments of its functions, by name.
        defines: macros, where one file has several forms.
    """

    name: str
    signatures: Mapping[str, _Signature]
    defines: tuple[str, ...] = ()

    def why_not(self, machine: Machine, case: Case) -> str | None:
        """The `why_not` of CPU candidates in C++. Builds the library where it is not there yet (seconds)."""
        if case.device_type != "cpu":
            return "it runs on CPUs only"
        if machine.cxx_compiler is None:
            return "it is built on first use, and no C++ compiler was found (set CXX, or install g++)"
        outcome = _outcome(self, machine.cxx_compiler)
        return None if isinstance(outcome, ctypes.CDLL) else outcome

    @property
    def functions(self) -> ctypes.CDLL:
        """Functions of a built CPU library, loaded.

        Raises:
            BuildError: it cannot be built or loaded; `why_not` would have said so.
        """
        return _loaded(self)


FP8 = Library(
    "fp8",
    {
        "tw_encode": (None, [_INT] * 3 + [_POINTER] + [_LONG] * 3 + [_POINTER] * 4 + [_INT]),
        "tw_decode": (None, [_INT, _INT, _POINTER] + [_LONG] * 3 + [_POINTER] + [_LONG] * 4 + [_POINTER, _INT]),
        "tw_is_exact": (_INT, [_INT, _POINTER] + [_LONG] * 4),
    },
)
LOW_BIT_ADAM = Library(
    "low_bit_adam",
    {
        "tw_low_bit_adam": (None, [_INT, _INT] + [_POINTER] * 8 + [_LONG] * 3 + [_FLOAT] * 7 + [_INT, _INT]),
        "tw_adam": (None, [_INT] * 3 + [_POINTER] * 5 + [_LONG] + [_FLOAT] * 7 + [_INT] * 4),
    },
)

WGRAD = Library(
    "wgrad",
    {
        "tw_ask_for_tiles": (_INT, []),
        "tw_weight_gradient": (_INT, [_POINTER, _LONG] * 2 + [_POINTER] + [_LONG] * 3 + [_INT, _INT]),
    },
)
ROW_LINEAR = Library(
    "row_linear", {"tw_row_linear": (_INT, [_INT] + [_POINTER] * 2 + [_LONG] + [_POINTER] * 2 + [_LONG] * 3 + [_INT])}
)
CACHED_LAYER = Library("cached_layer", {"tw_cached_layer": (_INT, [_INT, _POINTER, _FLOAT, _INT])})
_ATTENTION_CALL = (_INT, [_POINTER, _POINTER, _POINTER, _FLOAT, _INT])
_ATTENTION_CALLS = {"tw_attention": _ATTENTION_CALL, "tw_attention_backward": _ATTENTION_CALL}
AMX_ATTENTION = Library("attention", {"tw_ask_for_tiles": (_INT, []), **_ATTENTION_CALLS}, defines=("TILES",))
AVX512_ATTENTION = Library("attention", _ATTENTION_CALLS)


@functools.cache  # asked for in each operation, so the search for a compiler is not repeated
def _loaded(library: Library) -> ctypes.CDLL:
    compiler = find_cxx_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler")
    outcome = _outcome(library, compiler)
    if isinstance(outcome, str):
        raise BuildError(outcome)
    return outcome


@functools.cache
def _outcome(library: Library, compiler: str) -> ctypes.CDLL | str:
    try:
        path = build(library, compiler, Path(platformdirs.user_cache_dir("tilewright")) / "kernels")
        return load(library, path)
    except BuildError as error:
        return str(error)


def build(library: Library, compiler: str, folder: Path) -> Path:
    """Build a CPU library in `folder`, if it is not there, and return its file.

    Args:
        library: which.
        compiler: path of a C++ compiler.
        folder: where libraries are kept; made where needed.

    Raises:
        BuildError: the compiler failed, or the folder cannot be written to.
    """
    source = _FOLDER / f"{library.name}.cpp"
    version = _run([compiler, "--version"])
    files = [source.read_bytes(), *(path.read_bytes() for path in sorted(_FOLDER.glob("*.h")))]
    defines = (f"-D{name}" for name in library.defines)
    flags, features = (*FLAGS, *defines, *_without(cpu_features())), sorted(cpu_features())
    parts = [*files, *(text.encode() for text in (*flags, version, platform.machine(), *features))]
    path = folder / f"{library.name}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            _run([compiler, *flags, str(source), "-o", str(made)])
            os.replace(made, path)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written to: {error.strerror}") from error
    return path


def _without(features: frozenset[str]) -> tuple[str, ...]:
    """Flags to build CPU code without what torch may not use, against what `-march=native` finds: those kernels are as
    on a CPU without it."""
    return ("-mno-avx512f",) if "avx2" in features and "avx512f" not in features else ()


def load(library: Library, path: Path) -> ctypes.CDLL:
    """Load a built CPU library of a file, with torch's threads.

    Raises:
        BuildError: the file is not a library of this machine.
    """
    try:
        found = ctypes.CDLL(str(path))
        for name, (result, arguments) in library.signatures.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
        found.tw_use_openmp.restype, found.tw_use_openmp.argtypes = None, [_POINTER] * 3
    except (OSError, AttributeError) as error:
        raise BuildError(f"the built library does not load: {error}") from error
    openmp = openmp_path()
    if openmp is not None:
        runtime = ctypes.CDLL(openmp)  # loaded already: this finds it and starts no second pool
        found.tw_use_openmp(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in _OPENMP_FUNCTIONS))
    return found


def openmp_path() -> str | None:
    """The path of the OpenMP runtime that torch has loaded; None if there is none that we can call (kernels then use
    one thread)."""
    import torch  # noqa: F401  it loads the runtime

    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines)
    for path in paths:
        if Path(path).name.startswith(_OPENMP_NAMES):
            runtime = ctypes.CDLL(path)
            if all(hasattr(runtime, name) for name in _OPENMP_FUNCTIONS):
                return path
    return None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{Path(command[0]).name} did not run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{Path(command[0]).name} could not build it: {first}")
    return done.stdout
