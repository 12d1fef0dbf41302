"""The entries of conf/sparsity: what they say is what the policies take, and mistakes are found."""

from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")

from omegaconf import OmegaConf

from pipeback import sparsities
from pipeback.recipes import build, schemas

FOLDER = Path(__file__).parents[2] / "conf" / "sparsity"
ENTRIES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read(entry, **options):
    return {**OmegaConf.to_container(OmegaConf.load(FOLDER / f"{entry}.yaml")), **options}


def test_every_policy_has_an_entry():
    assert set(ENTRIES) == {"none", "magnitude", "gradual", "set", "rigl"}


@pytest.mark.parametrize("name", [entry for entry in ENTRIES if entry != "none"])
def test_an_entry_builds_its_policy(name):
    options = read(name)
    assert set(options) == {"name", *sparsities.options(name)}  # all can be set on the command line
    made = build.sparsity(schemas.entry("sparsity", options))
    default = sparsities.create(name, **{k: options[k] for k in ("steps", "until") if k in options})
    assert made == default


def test_none():
    assert build.sparsity(schemas.entry("sparsity", read("none"))) is None is build.sparsity(None)
    assert build.sparsity("none") is None


def test_other_ways_to_name_a_policy():
    made = sparsities.create("set", density=0.3)
    assert build.sparsity(made) is made and build.sparsity("set") == sparsities.create("set")
    own = {"_target_": "pipeback.sparsities.set.SparseEvolution", "density": 0.3, "exclude": ["a", "b*"]}
    found = build.sparsity(schemas.entry("sparsity", own))
    assert found == sparsities.create("set", density=0.3, exclude=("a", "b*"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rigl", {"densty": 0.1}, "did you mean 'sparsity.density'"),
        ("rigl", {"name": "riggl"}, "unknown sparsity 'riggl'; did you mean 'rigl'.*none, magnitude"),
        ("rigl", {"density": "much"}, "sparsity.density: Value 'much'"),
        ("gradual", {"steps": 1.5}, "sparsity.steps: Value '1.5'"),
        ("set", {"by_sign": "maybe"}, "sparsity.by_sign: Value 'maybe'"),
        ("none", {"density": 0.1}, "sparsity.density"),
    ],
)
def test_mistakes_are_found(name, options, message):
    with pytest.raises(ValueError, match=message):
        schemas.entry("sparsity", read(name, **options))


def test_values_are_checked_by_the_policy():
    with pytest.raises(ValueError, match="density must be a share, above 0 and up to 1, but is 2"):
        build.sparsity(schemas.entry("sparsity", read("magnitude", density=2)))
