"""Benchmarks: `python -m benchmarks sdpa [--quick] [--out DIR]`."""
