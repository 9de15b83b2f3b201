"""Linear attention: Gated DeltaNet, forward and backward, over packed sequences."""
