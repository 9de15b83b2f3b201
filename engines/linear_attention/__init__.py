"""Linear attention over packed sequences: Gated DeltaNet, Kimi Delta Attention and Gated DeltaNet 2."""
