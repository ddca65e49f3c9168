"""The only reader of environment variables, and the table that documents them.

Variables that stand for a setting become `EnvSetting`s, which `core.config.load` types and checks like an
override from the command line. The few that are not settings (colour, compiler, rank) have a
function each. Nothing is read at import; every function takes the environment as an argument.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import ConfigError, Problem

PREFIX = "TILEWRIGHT_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
MOST_THREADS = 1024  # that may be asked for: with tens of thousands OpenMP's runtime ends the process without an error


@dataclass(frozen=True)
class Variable:
    """One row of the table: the variable, what it sets (empty: not a setting), its values and its meaning."""

    name: str
    sets: str
    values: str
    meaning: str


VARIABLES = (
    Variable("DEEPSEEK_AMP_ENABLED", "precision.enabled", "1 or 0", "0: everything in FP32, whatever the mode says"),
    Variable(
        "DEEPSEEK_PRECISION_MODE",
        "precision.mode",
        "those of `precision.mode`",
        "precision of the run",
    ),
    Variable(
        "DEEPSEEK_LOSS_SCALE_WINDOW",
        "precision.loss_scale_window",
        "an integer, at least 1",
        "clean steps before the loss scale doubles",
    ),
    Variable(
        "DEEPSEEK_FP32_OPS",
        "precision.fp32_ops",
        "names with commas between: layer_norm,softmax",
        "operations kept in FP32 in addition to those of the mode",
    ),
    Variable(
        "TILEWRIGHT_<SECTION>_<FIELD>",
        "any setting",
        "what `--section.field` takes",
        "TILEWRIGHT_TRAIN_GLOBAL_BATCH_SIZE=8 is --train.global_batch_size 8",
    ),
    Variable("TILEWRIGHT_API_KEY", "", "any text", "key that clients of `serve` must send; --api-key wins"),
    Variable("NO_COLOR", "", "any text", "no colour on a terminal"),
    Variable(
        "COLUMNS", "", "an integer", "width of text and tables; else that of the terminal, and none in a file or a pipe"
    ),
    Variable("CXX", "", "a command", "C++ compiler for compiled layers; else g++ or clang++ is looked for"),
    Variable(
        "ONEDNN_MAX_CPU_ISA",
        "",
        "AVX2, AVX512_CORE_BF16 and oneDNN's other names",
        "newest x86 instructions that torch's matmuls may use; kernels are chosen and plans made for those alone",
    ),
    Variable("DNNL_MAX_CPU_ISA", "", "as ONEDNN_MAX_CPU_ISA", "its older name, read where the other is unset"),
    Variable(
        "ATEN_CPU_CAPABILITY",
        "",
        "default, avx2 or avx512",
        "newest x86 vectors of torch's other kernels and of compiled layers; chosen and planned for alike",
    ),
    Variable(
        "THP_MEM_ALLOC_ENABLE",
        "",
        "1 or 0",
        "torch asks for huge pages for large CPU tensors. The command line sets 1 where it is unset",
    ),
    Variable(
        "GOMP_SPINCOUNT",
        "",
        "an integer",
        "how long a CPU thread spins for its next work. The command line sets 10000 where it is unset",
    ),
    Variable("RANK", "", "an integer", "rank of this process, set by torchrun; only rank 0 prints"),
    Variable("LOCAL_RANK", "", "an integer", "rank of this process on its machine, set by torchrun"),
    Variable("WORLD_SIZE", "", "an integer", "number of processes, set by torchrun"),
    Variable(
        "SLURM_ARRAY_TASK_ID", "", "an integer", "task of a Slurm job array; a rank of `data build --executor rank`"
    ),
    Variable("SLURM_ARRAY_TASK_MIN", "", "an integer", "first task of the array, set by Slurm"),
    Variable("SLURM_ARRAY_TASK_COUNT", "", "an integer", "number of tasks of the array, set by Slurm"),
    Variable(
        "RAY_ADDRESS",
        "",
        "host:port, or auto",
        "Ray cluster of `data build --executor ray`; where it is unset, Ray is started on this machine",
    ),
    Variable("LOCAL_WORLD_SIZE", "", "an integer", "number of processes on this machine, set by torchrun"),
    Variable("MASTER_ADDR", "", "a host", "where the processes meet, set by torchrun"),
    Variable("MASTER_PORT", "", "an integer", "port of that host, set by torchrun"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "", "True or False", "whether torchrun itself is there, set by it"),
    Variable("TORCHELASTIC_RESTART_COUNT", "", "an integer", "how often torchrun has started all processes again"),
)
_NO_SETTINGS = {row.name for row in VARIABLES if not row.sets}


@dataclass(frozen=True)
class EnvSetting:
    """A value for one field. `value` is text still to be typed by the schema, or already a bool or list."""

    field: str
    value: object
    name: str


def settings(environ: Mapping[str, str] | None = None) -> tuple[list[EnvSetting], list[Problem]]:
    """Settings given by the environment, and what is wrong with them.

    An empty variable counts as not set. A `DEEPSEEK_*` alias and the `TILEWRIGHT_*` variable of the same field
    cannot both be set: which one wins would be a guess.

    Example:
        >>> settings({"DEEPSEEK_FP32_OPS": "layer_norm, softmax"})[0][0].value
        ['layer_norm', 'softmax']
    """
    environ = os.environ if environ is None else environ
    found: dict[str, EnvSetting] = {}
    problems: list[Problem] = []
    for name in sorted(environ):
        text = environ[name].strip()
        if not text:
            continue
        setting = _alias(name, text, problems) or _generic(name, text)
        if setting is None:
            continue
        other = found.get(setting.field)
        if other is not None:
            problems.append(
                Problem(
                    f"{setting.field} is set twice in the environment",
                    got=f"{other.name}={environ[other.name]} and {name}={text}",
                    need="one of them",
                    try_=f"unset {other.name}",
                    where="environment",
                )
            )
            continue
        found[setting.field] = setting
    return list(found.values()), problems


def _alias(name: str, text: str, problems: list[Problem]) -> EnvSetting | None:
    row = next((row for row in VARIABLES if row.name == name and row.sets), None)
    if row is None:
        if name.startswith("DEEPSEEK_"):
            known = ", ".join(row.name for row in VARIABLES if row.name.startswith("DEEPSEEK_"))
            problems.append(
                Problem("Unknown environment variable", got=name, need=known, try_=f"unset {name}", where="environment")
            )
        return None
    if name == "DEEPSEEK_AMP_ENABLED":
        if text.lower() not in _TRUE + _FALSE:
            problems.append(
                Problem(
                    f"{name} is neither on nor off",
                    got=repr(text),
                    need="1 or 0",
                    try_=f"export {name}=1",
                    where=f"environment variable {name}",
                )
            )
            return None
        return EnvSetting(row.sets, text.lower() in _TRUE, name)
    if name == "DEEPSEEK_FP32_OPS":
        return EnvSetting(row.sets, [part.strip() for part in text.split(",") if part.strip()], name)
    return EnvSetting(row.sets, text, name)


def _generic(name: str, text: str) -> EnvSetting | None:
    """`TILEWRIGHT_TRAIN_GLOBAL_BATCH_SIZE` -> `train.global_batch_size`. Section names hold no underscore."""
    if not name.startswith(PREFIX) or name in _NO_SETTINGS:
        return None
    section, _, field = name.removeprefix(PREFIX).lower().partition("_")
    return EnvSetting(f"{section}.{field}" if field else section, text, name)


def columns() -> int | None:
    """The columns that text is wrapped to: COLUMNS, else those of the terminal; None for a file or a pipe."""
    return shutil.get_terminal_size((0, 0)).columns or None


def no_color(environ: Mapping[str, str] | None = None) -> bool:
    """True where the user asks for no colour."""
    return bool((os.environ if environ is None else environ).get("NO_COLOR"))


def compiler(environ: Mapping[str, str] | None = None) -> str:
    """The C++ compiler named by `CXX`; empty where it is not set."""
    return (os.environ if environ is None else environ).get("CXX", "").strip()


def matmul_limit(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The variable that limits the instructions of oneDNN, and its value in lower case, as oneDNN reads them; two empty
    texts where none is set.

    Example:
        >>> matmul_limit({"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "AVX2"})
        ('DNNL_MAX_CPU_ISA', 'avx2')
    """
    environ = os.environ if environ is None else environ
    name = next((name for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if environ.get(name)), "")
    return name, environ.get(name, "").lower()


def vector_limit(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The variable that limits the vectors of torch's own kernels, and its value; two empty texts where it is unset."""
    value = (os.environ if environ is None else environ).get("ATEN_CPU_CAPABILITY", "")
    return ("ATEN_CPU_CAPABILITY", value) if value else ("", "")


def tune_cpu_runtime() -> None:
    """Settings of torch's CPU runtime that it reads once, unless the user decided. Call before torch is imported.

    Huge pages: a training step allocates and frees every activation; with pages of 4 KiB the kernel clears and maps
    each of them again at every step. Spinning: by default an OpenMP thread spins for milliseconds at every barrier,
    so one other busy process on the machine slows a step several times over; short spinning costs nothing when
    alone. Measured in docs/log.md. The profiler says each of its starts on stderr, unless it is told not to.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def importing(folder: Path) -> dict[str, str]:
    """This process's environment, for a Python child that looks for modules in `folder` first."""
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def of_consumer(folder: Path, threads: int) -> dict[str, str]:
    """`importing(folder)` for a child that another project's runtime works in: at most `threads` threads of OpenMP, and
    no question to a model hub."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return importing(folder) | {"OMP_NUM_THREADS": str(threads)} | offline


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started. One process alone: 0, 0, 1, 1."""

    rank: int
    local_rank: int
    world: int
    local_world: int = 1
    """Processes on this machine."""


def ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """Rank, local rank and world size as torchrun sets them.

    Raises:
        ConfigError: one of them is not an integer.
    """
    environ = os.environ if environ is None else environ
    found = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    found |= {name: environ[name] for name in found if environ.get(name)}
    for name, text in found.items():
        if not text.isdecimal():
            where = f"environment variable {name}"
            raise ConfigError(
                f"{name} is not a number", got=repr(text), need="an integer", try_=f"unset {name}", where=where
            )
    return Ranks(*map(int, found.values()))


def job_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """`ranks`, or this task of a Slurm job array where torchrun started nothing.

    Raises:
        ConfigError: a variable is not an integer.

    Example:
        >>> array = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}
        >>> job_ranks(array).rank, job_ranks(array).world, job_ranks({"RANK": "1", "WORLD_SIZE": "2"}).world
        (2, 4, 2)
    """
    environ = os.environ if environ is None else environ
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")
    if environ.get("RANK") or not environ.get(names[0]):
        return ranks(environ)
    task, first, count = (environ.get(name) or "0" for name in names)
    if not (task.isdecimal() and first.isdecimal() and count.isdecimal()):
        got = ", ".join(f"{name}={environ.get(name)}" for name in names)
        raise ConfigError("Slurm's numbers of an array are no integers", got=got, need="integers", where="environment")
    return ranks({"RANK": f"{int(task) - int(first)}", "WORLD_SIZE": count})


ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that make a process compute with one thread."""


def tokenizer_threads() -> int:
    """The number of threads that encode texts: as many as `tokenizers` would take."""
    alone = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false", "off", "no", "n", "f")
    given = os.environ.get("RAYON_NUM_THREADS", "")
    return 1 if alone else int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


@contextmanager
def one_thread() -> Iterator[None]:
    """Processes that are started inside compute with one thread each: several of them share the cores."""
    with unchanged():
        os.environ |= ONE_THREAD
        yield


def ray_address(environ: Mapping[str, str] | None = None) -> str:
    """Address of the Ray cluster that the user names; empty where none is."""
    return (os.environ if environ is None else environ).get("RAY_ADDRESS", "").strip()


@contextmanager
def starting_ray() -> Iterator[None]:
    """A Ray that is imported and started inside sends no usage statistics, and takes the modules of this process, not
    a copy of the working folder (what it does under `uv run`)."""
    with one_thread():
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        yield


def agent_store(environ: Mapping[str, str] | None = None) -> tuple[str, int, str] | None:
    """Host and port of torchrun's store, and how often it has started the ranks again; None without torchrun."""
    environ = os.environ if environ is None else environ
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not host or not port.isdecimal():
        return None
    return host, int(port), environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def meeting_point(environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Host and port at which the first rank's process waits for the others, as a launcher sets them.

    Raises:
        ConfigError: it has not.
    """
    environ = os.environ if environ is None else environ
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            "Several processes, and nowhere to meet",
            got=f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}, WORLD_SIZE={environ.get('WORLD_SIZE', '')!r}",
            need="host and port of the first process on all of them",
            try_="torchrun --nproc-per-node N -m tilewright ..., which sets them; or unset WORLD_SIZE and RANK",
            where="environment",
        )
    return host, int(port)


def of_ranks(world: int, port: int) -> list[dict[str, str]]:
    """Variables that torchrun would set for `world` processes on this machine, for a caller that starts them itself."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": ""}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


@contextmanager
def unchanged() -> Iterator[None]:
    """Inside, a library may set variables of this process; afterwards they are as they were."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
