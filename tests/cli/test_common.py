"""What commands share: the import of torch without searches for garbage."""

import subprocess
import sys


def test_what_was_imported_is_never_searched_for_garbage():
    code = """
import gc
from tilewright.cli.common import gc_paused
with gc_paused():
    assert not gc.isenabled()
    import torch
assert gc.isenabled()
frozen = gc.get_freeze_count()
with gc_paused():
    kept = [[] for _ in range(100)]
print(frozen > 100_000, gc.get_freeze_count() == frozen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
