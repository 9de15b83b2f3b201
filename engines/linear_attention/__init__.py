"""Linear attention: Gated DeltaNet."""
