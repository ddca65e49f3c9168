"""No call in the package that runs what a file holds, and each reader says so itself instead of by a default."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tilewright"

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "code", "runpy"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "unpack_archive", "extractall", "load_state_dict_from_url"}
NEEDED = {
    "torch.load": {"weights_only": True},
    "np.load": {"allow_pickle": False},
    "numpy.load": {"allow_pickle": False},
    "from_config": {"trust_remote_code": False},
    "AutoConfig.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "auto.from_pretrained": {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True},
    "AutoTokenizer.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "nn.Embedding.from_pretrained": {},  # of a tensor
    "model_class.from_pretrained": {},  # of a class and tensors that are here already; the folder is None
}
READERS = ("from_pretrained", "from_config")
FILES = ("FileSystemReader", "DefaultLoadPlanner")
"""DCP's own readers unpickle; `index` alone names them, as the bases of those that do not."""


def faults(text: str) -> list[str]:
    """What a source text may not have, one line each."""
    tree = ast.parse(text)
    named = _constants(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            if [a.name for a in node.names] != ["YAMLError"]:  # what a library raises loads nothing
                found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {problem}" for problem in _call(node, named)]
    return found


def _call(node: ast.Call, named: dict[str, dict[str, object]]) -> list[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name in BANNED_CALLS or last in BANNED_CALLS - {"eval", "compile"}:
        return [f"{name}()"]
    if any(keyword.arg == "shell" for keyword in node.keywords) or name == "os.system":
        return [f"{name} of a shell"]
    needed = next((args for call, args in NEEDED.items() if name == call or name.endswith("." + call)), None)
    if needed is None:
        return [f"{name} is not in the list of this test"] if last in READERS else []
    given: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            given |= named.get(ast.unparse(keyword.value), {})
        elif isinstance(keyword.value, ast.Constant):
            given[keyword.arg] = keyword.value.value
    return [f"{name} without {key}={value}" for key, value in needed.items() if given.get(key) is not value]


def _constants(tree: ast.Module) -> dict[str, dict[str, object]]:
    """Dicts of constants at the top of a module, by name: what `**NAME` gives."""
    found: dict[str, dict[str, object]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            values: dict[str, object] = {}
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if key is None:
                    values |= found.get(ast.unparse(value), {})
                elif isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    values[str(key.value)] = value.value
            found[node.targets[0].id] = values
    return found


def test_no_file_runs_what_it_reads():
    found = {path.relative_to(SOURCE): faults(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    assert len(found) > 500
    assert {str(path): some for path, some in found.items() if some} == {}


def test_only_the_index_names_the_readers_that_unpickle():
    users = {path.name for path in SOURCE.rglob("*.py") if any(f in path.read_text(encoding="utf-8") for f in FILES)}
    assert users == {"tensor_index.py"}
    loads = {path.name for path in SOURCE.rglob("*.py") if "dcp.load(" in path.read_text(encoding="utf-8")}
    assert loads == {"checkpoint_store.py"}  # which gives it both


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from yaml import load",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "x.from_config(c)",
        "auto.from_pretrained(path, local_files_only=True)",
        "other.from_pretrained(path)",
        "tarfile.open(p).extractall(q)",
    ],
)
def test_the_search_finds(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.compile(model)",
        "torch.load(path, weights_only=True)",
        "np.load(path, mmap_mode='r', allow_pickle=False)",
        "A = {'trust_remote_code': False}\nx.from_config(c, **A)",
    ],
)
def test_the_search_leaves_alone(text):
    assert faults(text) == []
