"""Faults that a search over options once found: `FAULTS`, name -> what shows it."""

from . import as_one, files, fused, life, options, ranks, refused, resuming, wrong_numbers
from .table import FAULTS

__all__ = ["FAULTS", "as_one", "files", "fused", "life", "options", "ranks", "refused", "resuming", "wrong_numbers"]
