"""Files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from .table import fault, layers, pipeline, train


@fault("a store whose last version is missing begins at zero without a word")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(layers(), store=f"disk:{folder}")
        train(pipe)
        pipe.commit()
        pipe.close()
        for version in Path(folder).rglob("version-*.json"):
            version.unlink()
        with pytest.raises(RuntimeError, match="version"):
            pipeline(layers(), store=f"disk:{folder}")
