"""What docs/benchmarks.md says of the committed results: claims, their targets and verdicts."""
