"""The version is one number, wherever it stands."""

import re
import tomllib

import pytest

import pipeback
from pipeback.recipes.main import main
from tests.helpers.pages import ROOT


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_command_tells_its_version(option, capsys):
    main([option])
    assert capsys.readouterr().out == f"pipeback {pipeback.__version__}\n"


def test_every_file_tells_the_same_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert pipeback.__version__ == project == citation[1] == newest[1]
