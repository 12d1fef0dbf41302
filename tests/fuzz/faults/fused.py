"""Fused optimizers."""

from __future__ import annotations

from tests.fuzz.program import Program

from .table import FAULTS, ONE

FAULTS["joined stages of other histories, with fused momentum SGD"] = Program(optimizer="fused-momentum", calls=ONE * 8)
