"""The wheel holds every config, template and recipe: a folder that pyproject.toml forgets is missing only there."""

import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
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
    return file


@pytest.fixture(scope="module")
def wheel(built):
    return zipfile.ZipFile(built)


def test_wheel_holds_every_file(wheel):
    expected = set()
    for folder, inside in (("pipeback", "pipeback"), ("conf", "pipeback/conf"), ("recipes", "pipeback/recipes")):
        for file in (ROOT / folder).rglob("*"):
            data = file.suffix in (".toml", ".csv") and (folder == "pipeback" or file.parent.name == "measured")
            if file.suffix in (".py", ".yaml", ".jinja", ".html") or file.name == "py.typed" or data:
                expected.add(f"{inside}/{file.relative_to(ROOT / folder)}")
    assert {
        "pipeback/py.typed",
        "pipeback/conf/method/pb.yaml",
        "pipeback/recipes/templates/report.html.jinja",
    } <= expected
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


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """An environment with the wheel alone, which sees the others of this one: its python, and a clean os.environ."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.EnvBuilder(system_site_packages=True, with_pip=False).create(folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", built]
    done = subprocess.run(pip, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    # after the installation: pip must not take the pipeback of this environment for that of the new one. A folder named
    # in a .pth file comes last, and .pth files in it are not read, so an editable pipeback there is not found
    purelib = next(folder.rglob("site-packages"))
    (purelib / "outer.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return python, clean


def test_wheel_trains_outside_the_checkout(installed, tmp_path):
    python, clean = installed
    where = [
        python,
        "-c",
        "import pipeback, pipeback.recipes, pipeback.conf as c; print(pipeback.__file__, c.__file__)",
    ]
    found = subprocess.run(where, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert all(Path(file).is_relative_to(python.parents[1]) for file in found.stdout.split()), (
        found.stdout + found.stderr
    )
    small = ["data.samples=96", "model.depth=4"]
    command = [python.with_name("pipeback"), "train", "experiment=digits", "quick=true", *small]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "train" / "digits" / "cerebras-seed0" / "metrics.csv").is_file()
    assert "accuracy" in done.stdout


SCRIPT = """
import torch
from torch import nn

import pipeback

net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
pipe = pipeback.Pipeline(
    net, loss=nn.functional.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method="pb"
)
loss: torch.Tensor = pipe.push(torch.randn(8, 4), torch.randn(8, 2))
reveal_type(pipe.delays)
pipe.close()
"""


@pytest.mark.soak
@pytest.mark.parametrize("torch_too", [False, True])
def test_mypy_of_a_users_script(torch_too, installed, tmp_path):
    """torch_too: with torch's own types, which take mypy most of the time."""
    python, clean = installed
    (tmp_path / "mypy.ini").write_text("[mypy]\n" + "[mypy-torch.*]\nfollow_imports = skip\n" * (not torch_too))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(SCRIPT.replace('method="pb"', 'workers="two"'))
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--python-executable", python]
    mypy = [sys.executable, "-m", "mypy", *options, "script.py", "wrong.py"]
    told = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path, env=clean).stdout
    found, wrong = ("\n".join(re.findall(rf"^{name}\.py:.*", told, re.M)) for name in ("script", "wrong"))
    assert re.search(r'Revealed type is "(builtins\.)?list\[(builtins\.)?int\]"', found), told
    assert "error" not in found, told
    assert 'Argument "workers"' in wrong, f"types are not seen: {told}"
