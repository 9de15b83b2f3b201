"""The operations: one file each, over one table of primitives."""
