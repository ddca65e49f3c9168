"""The job of `benchmarks.data.data_peer` in datatrove, run by a Python of its own, which has no tilewright.

As datatrove's own example of FineWeb: local executors one after the other, Gopher's two filters, MinHash in four steps.
Further than the example: the filtered texts and their signatures come out of one pass, files are uncompressed Parquet,
processes are forked, and no excluded text is written. `--words space` splits words at white space, through the hook for
word tokenizers that datatrove has; its own choice for English is spaCy.

It prints one line of JSON: seconds of each step, and counts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer
from datatrove.pipeline.writers import ParquetWriter
from datatrove.utils.logging import logger
from datatrove.utils.word_tokenizers import WordTokenizer

NGRAMS = ((5, 0.15), (10, 0.10))
"""Of Gopher's shares of repeated runs those that tilewright has too."""


class SpaceWords(WordTokenizer):
    """Words are what stands between white space."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError("no filter of this job asks for sentences")

    span_tokenize = sent_tokenize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", choices=["spacy", "space"], required=True)
    parser.add_argument("--buckets", type=int, required=True)
    parser.add_argument("--hashes", type=int, required=True)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    out, files = str(args.out), len(list(args.source.glob("*.jsonl")))
    language: str | WordTokenizer = SpaceWords() if args.words == "space" else "en"
    config = MinhashConfig(n_grams=5, num_buckets=args.buckets, hashes_per_bucket=args.hashes)
    seconds, stats = {}, {}

    def run(name: str, pipeline: list, tasks: int) -> None:
        began = time.perf_counter()
        workers = min(args.workers, tasks)
        executor = LocalPipelineExecutor(
            pipeline, tasks, workers, logging_dir=f"{out}/logs/{name}", start_method="fork"
        )
        executor.run()
        seconds[name] = time.perf_counter() - began
        told = json.loads(Path(f"{out}/logs/{name}/stats.json").read_bytes())
        stats[name] = {one["name"].split(" ", 1)[1]: one["stats"] for one in told}

    began = time.perf_counter()
    filtered = [
        JsonlReader(str(args.source), compression=None),
        GopherRepetitionFilter(dup_n_grams=NGRAMS, language=language),
        GopherQualityFilter(language=language),
        ParquetWriter(f"{out}/filtered", compression=None),
        MinhashDedupSignature(f"{out}/signatures", config, language=language),
    ]
    run("filter and sign", filtered, files)
    run("buckets", [MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)], args.buckets)
    run("cluster", [MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config)], 1)
    last = ParquetWriter(f"{out}/deduplicated")
    pipeline = [ParquetReader(f"{out}/filtered"), MinhashDedupFilter(f"{out}/remove"), last]
    if args.tokenizer:
        pipeline.append(DocumentTokenizer(f"{out}/tokens", args.tokenizer, eos_token="", shuffle_documents=False))
    run("write", pipeline, files)
    print(json.dumps({"seconds": time.perf_counter() - began, "steps": seconds, "stats": stats}))


if __name__ == "__main__":
    main()
