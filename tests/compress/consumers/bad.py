"""A consumer that misbehaves as its options say: it dies, hangs, eats memory, raises, or answers nonsense."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tilewright.compress.prove.consumer_session import ConsumerSession, serve


class Bad(ConsumerSession):
    """See the module."""

    def __init__(self, request):
        super().__init__(request)
        self.runtime = "bad 1.0"
        how = request.options["how"]
        print(f"about to {how}", flush=True)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(request.options["note"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if how == "eat":
            kept = []
            while True:
                kept.append(np.ones(2**23, np.uint8))
        if how == "raise":
            raise ValueError("no such operator: Frobnicate")
        if how == "leave":
            sys.exit(0)

    def logits(self, ids_S, positions_P):
        vocab = self.request.options.get("vocab", 7)
        value = np.nan if self.request.options["how"] == "nan" else 0.0
        return np.full((len(positions_P), vocab), value)

    def prefill_s(self, ids_S):
        return 0.001


if __name__ == "__main__":
    serve(Bad)
