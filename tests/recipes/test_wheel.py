"""The wheel holds every config, template and recipe: a folder that pyproject.toml forgets is missing only there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    # built from a copy: a build folder of an earlier version would put its old files into the wheel
    for name in ("pipeback", "conf", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(build, capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(file)


def test_wheel_holds_every_file(wheel):
    expected = set()
    for folder, inside in (("pipeback", "pipeback"), ("conf", "pipeback/conf"), ("recipes", "pipeback/recipes")):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".jinja", ".html"):
                expected.add(f"{inside}/{file.relative_to(ROOT / folder)}")
    assert {"pipeback/conf/method/pb.yaml", "pipeback/recipes/templates/report.html.jinja"} <= expected
    assert expected <= set(wheel.namelist()), "pyproject.toml: packages or package-data misses a folder"


def test_wheel_installs_one_package_and_one_script(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipeback"}
    (scripts,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "pipeback = pipeback.recipes.main:main" in wheel.read(scripts).decode()


def test_core_needs_torch_alone(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    assert [x for x in lines if x.startswith("Requires-Dist") and "extra ==" not in x] == ["Requires-Dist: torch>=2.11"]
