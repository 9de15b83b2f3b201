"""Graphs of no family, and what a family's own reference cannot express: run node by node in plain JAX."""
