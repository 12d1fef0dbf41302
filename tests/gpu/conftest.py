"""Ranks on GPUs are those of tests/processes."""

from tests.processes.conftest import crew

__all__ = ["crew"]
