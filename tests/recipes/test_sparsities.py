"""The entries of conf/sparsity: what they say is what the policies take, and mistakes are found."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("lightning")

from omegaconf import OmegaConf

from pipeback import sparsities
from pipeback.recipes import build, schemas
from tests.recipes.cli import SMALL, TINY, config, pipeback

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


@pytest.mark.parametrize("place", ["host", "null"])
def test_a_store_in_the_place_of_its_group_does_not_drop_the_sparsity(place, tmp_path):
    options = [*TINY, "sparsity=set", "sparsity.density=0.5", "sparsity.every=1", "method=pb", "epochs=1"]
    refused = pipeback("train", *options, f"trainer.strategy.store={place}", "out=run", cwd=tmp_path)
    assert refused.returncode == 2 and not list(tmp_path.iterdir())
    message = refused.stderr.strip()
    assert message.startswith(f"pipeback train: trainer.strategy.store={place} leaves sparsity=set out")
    cure = message.partition("; write ")[2]
    assert cure == f"trainer.strategy.store.store={place}"
    done = pipeback("train", *options, cure, "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    store = config(tmp_path / "run").trainer.strategy.store
    assert store.store == (None if place == "null" else place) and store.sparsity.options.name == "set"
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    shares = [float((v == 0).float().mean()) for v in saved.values() if v.ndim == 2]
    assert max(shares) > 0.4, shares  # it trained sparse


@pytest.mark.parametrize("words", [["trainer=plain"], ["trainer.strategy.store.sparsity=null"]])
def test_a_sparsity_that_no_pipeline_is_given_is_refused(words, tmp_path):
    refused = pipeback("train", *SMALL, "sparsity=set", *words, "out=run", cwd=tmp_path)
    assert refused.returncode == 2 and "sparsity=set" in refused.stderr and "; choose sparsity=none" in refused.stderr
    cured = pipeback("train", *SMALL, "sparsity=none", *words, "out=run", "max_steps=1", cwd=tmp_path)
    assert cured.returncode == 0, cured.stderr


def test_a_store_in_the_place_of_its_group_is_a_short_form_where_all_is_dense(tmp_path):
    done = pipeback("train", *TINY, "trainer.strategy.store=host", "method=pb", "max_steps=1", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
