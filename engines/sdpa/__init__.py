"""The attention families: facts, ranking and engines of `sdpa` and `sdpa_backward`."""
