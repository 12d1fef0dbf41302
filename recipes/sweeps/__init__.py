"""Sweeps: which runs a sweep has, what came of them, and their tables and pictures."""
