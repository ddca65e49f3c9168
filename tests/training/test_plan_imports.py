"""A plan loads neither what runs a step nor what reads data: most of its seconds are imports."""

import subprocess
import sys

LOOK = """
import sys
import tilewright.cli.plan_output, tilewright.training.planning.plan_request
heavy = "pyarrow", "transformers", "torch._inductor", "tilewright.training.assemble", "tilewright.training.executor"
ours = [f"tilewright.data.{name}" for name in ("dataset", "engine", "stages", "readers")]
print(*[name for name in (*heavy, *ours) if name in sys.modules])
"""


def test_a_plan_imports_nothing_that_trains_or_reads():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == ""
