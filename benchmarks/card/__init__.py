"""Parts of `benchmarks.gpu`, which need a CUDA device; `--tiny` runs each on a CPU."""
