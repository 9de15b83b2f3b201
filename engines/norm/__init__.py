"""Norms: RMS norm forward and backward."""
