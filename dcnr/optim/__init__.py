"""Optimizers and the decision at the end of a step. Pure."""
