"""Kernels in Triton. Imported lazily, where a candidate that needs them runs; triton comes with torch's CUDA wheels."""
