"""Triton's interpreter for kernels on CPU. Its switch must be set before triton is imported, which happens while other
tests are collected (by transformers and torch's compiler): so it stands here, at the top."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Property-based tests draw the same cases every time, so that a green suite stays green; `make fuzz` draws new ones. No
# deadline: how long one example takes says more of what else runs on the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
