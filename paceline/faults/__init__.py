"""Faults on purpose: the same ones for tests and for users who want to see their run survive."""
