"""Benchmarks: `python -m benchmarks NAME [--quick] [--out DIR]`."""
