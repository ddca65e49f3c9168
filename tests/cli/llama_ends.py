"""Which tokens end an answer in llama.cpp's server: `python -m tests.cli.llama_ends FILE ID...` prints those ids.

Each id is forced as the first of two tokens. A server that counts it as an end draws no second one.
"""

import json
import sys

from tilewright.compress.prove.consumer_session import Request
from tilewright.compress.prove.llama_cpp import LlamaCpp


def main() -> None:
    session = LlamaCpp(Request(sys.argv[1], "", "", threads=1))
    ends = []
    for token in map(int, sys.argv[2:]):
        options = {"n_predict": 2, "logit_bias": [[token, 1e4]], "cache_prompt": False}
        answer = session._post("/completion", {"prompt": [5, 6], "temperature": 0.0, **options})
        ends += [token] if answer["stop_type"] == "eos" else []
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
