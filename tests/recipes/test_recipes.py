"""`pipeback train` end to end, tiny: every experiment, sweeps, resuming, the user's own configs and applications."""

import re
import runpy
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback import methods, plugins
from pipeback.recipes import command, forks
from tests.helpers.choice import mostly_rare, rare
from tests.helpers.processes import fork_for_spawn
from tests.recipes.cli import SMALL, TINY, config, facts, joblib_processes, numbers, pipeback, rows

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))
ONE_OF_EACH = "cifar10", "mnist", "streaming_gpt", "translation"  # of each kind of network and of data
SMALLER = {  # what makes an experiment tiny, besides quick=true
    "residual_mlp": ["model.depth=4"],
    "resnet20": ["model.width=4", "model.groups=2", "data.samples=32", "data.val_samples=16"],
    "transformer": ["model.depth=2", "model.width=16", "model.heads=2"],
    "gpt": ["model.layers=2", "model.width=16"],
}


def small(experiment):
    content = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text()
    (model,) = (model for model in SMALLER if f"override /model: {model}" in content)
    (entry,) = re.findall(r"override /data: (\w+)", content)
    data = (ROOT / "conf" / "data" / f"{entry}.yaml").read_text()
    builtin = ["data.builtin=true"] if "builtin:" in data else ["data.samples=96"]
    return [*SMALLER[model], *builtin]


@pytest.mark.soak
def test_devices_that_compute_together(tmp_path):
    """Two devices that compute each stage of the transformer together log what one logs, within rounding."""
    options = ["experiment=shakespeare", "quick=true", *small("shakespeare"), "method=pb", "seed=1"]
    for out, trainer in (("one", "default"), ("two", "tensor_parallel")):
        done = pipeback("train", *options, f"trainer={trainer}", f"out={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (rows(tmp_path / out)[-1]["val/loss"] for out in ("one", "two"))
    assert float(two) == pytest.approx(float(one), rel=1e-5)


@pytest.mark.parametrize("experiment", mostly_rare(EXPERIMENTS, *ONE_OF_EACH))
def test_experiment_trains(experiment, tmp_path):
    options = [f"experiment={experiment}", "quick=true", *small(experiment), "trainer.log_every_n_steps=1"]
    if experiment in ("cifar10", "fashion_mnist", "fashion_mnist_one"):  # in translation and others stages run as one
        options.append("trainer.strategy.vectorize=false")
    done = pipeback("train", *options, "method=pb", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    known, logged = facts(run), rows(run)
    assert known["delays"][0] == 2 * (known["stages"] - 1) and known["slack2"] and known["method"] == "pb"
    assert logged[-1][known["metric"]] is not None and logged[-1]["samples_seen"] == known["epoch_samples"]
    for column in ("train/loss", "val/loss", "wall_time", "pipeback/throughput", "pipeback/weight_copies"):
        assert any(column in row for row in logged), column
    assert all("samples_seen" in row and "wall_time" in row for row in logged if "val/loss" in row)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]  # no clutter
    assert {p.name for p in run.iterdir()} == {"checkpoints", "config.yaml", "hparams.yaml", "metrics.csv"}
    assert config(run).name == experiment and config(run).method.name == "pb"
    assert "written to run" in done.stdout


def test_same_seed_same_run(tmp_path):
    for out in ("a", "b"):
        assert pipeback("train", *TINY, f"out={out}", "callbacks=minimal", cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b") != []


def test_facts(tmp_path):
    """What a report is told: the scaled optimizer, delays, the bubble; all of it plain YAML."""
    options = ["method=pipedream_slack2", "seed=3", "callbacks=none", "out=run"]
    assert pipeback("train", *TINY, *options, cwd=tmp_path).returncode == 0
    known = facts(tmp_path / "run")
    assert known["method"] == "pipedream_slack2" and known["method_options"]["slack"] == 2 and known["seed"] == 3
    assert (known["stages"], known["delays"], known["slack2"]) == (5, [8, 6, 4, 2, 0], True)
    assert known["optimizer"]["momentum"] == pytest.approx(0.9 ** (1 / 32)) and known["update_size"] == 1
    assert known["classes"] == 10 and known["epoch_samples"] == 96 and known["experiment"] == "digits"
    assert 0 < known["bubble"] < 0.1 and known["bubble_micro_batches"] == 96


def test_plain_lightning_is_the_same_program(tmp_path):
    """trainer=plain leaves the pipeline out; `sgd` on whole batches gives the same bits."""
    options = [*SMALL, "micro_batch_size=null", "method=sgd"]
    assert pipeback("train", *options, "out=pipe", cwd=tmp_path).returncode == 0
    assert pipeback("train", *options, "trainer=plain", "out=plain", cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "pipe") == numbers(tmp_path / "plain")
    assert facts(tmp_path / "plain")["method"] == "plain" and facts(tmp_path / "plain")["update_size"] == 32


def test_rates_follow_warmup_and_decay(tmp_path):
    options = ["epochs=2", "optimizer.warmup=2", "optimizer.decay=linear", "optimizer.reference=null", "method=sgd"]
    assert pipeback("train", *TINY, *options, "out=run", cwd=tmp_path).returncode == 0
    rates = [row["lr-SGD"] for row in rows(tmp_path / "run") if "lr-SGD" in row]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.075, 0.05, 0.025])


@pytest.mark.parametrize(
    ("first", "every", "warmup"),
    [  # in the middle of an epoch, after a validation at its end, at its end
        ("max_steps=2", "2", 0), ("epochs=1", "2", 4), ("epochs=1", "1.0", 0),
        rare("max_steps=2", "2", 4), rare("epochs=1", "2", 0), rare("epochs=1", "1.0", 4),
    ],
)  # fmt: skip
def test_resumed_equals_uninterrupted(first, every, warmup, tmp_path):
    options = [*TINY, f"validate_every={every}", "epochs=2", "method=cerebras", f"optimizer.warmup={warmup}"]
    assert pipeback("train", *options, "out=whole", cwd=tmp_path).returncode == 0
    assert pipeback("train", *options, first, "out=a=b", cwd=tmp_path).returncode == 0
    last = "a=b/checkpoints/last.ckpt"
    done = pipeback("train", *options, "out=a=b", f"ckpt_path={last}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "a=b") == numbers(tmp_path / "whole")  # the rows before the checkpoint among them
    assert torch.load(tmp_path / last, weights_only=True)["global_step"] == 6


def test_a_diverged_run_ends_early_and_says_so(tmp_path):
    done = pipeback("train", *TINY, "optimizer.lr=1e30", "out=run", cwd=tmp_path)
    assert done.returncode == 0 and "diverged after" in done.stdout
    losses = [row["train/loss"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert losses[-1] != losses[-1]  # NaN


def test_sweep(tmp_path):
    """methods × seeds, one folder each; weights and order of the data depend on the seed alone."""
    done = pipeback("train", "-m", *TINY, "method=sgd,pb", "seed=0,1", "micro_batch_size=null", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "train" / "digits"
    runs = {path.name: numbers(path) for path in folder.iterdir() if path.is_dir()}
    assert sorted(runs) == ["pb-seed0", "pb-seed1", "sgd-seed0", "sgd-seed1"]
    assert runs["pb-seed0"][0] == runs["sgd-seed0"][0] != runs["pb-seed1"][0]


def test_sweep_over_other_options_tells_folders_apart(tmp_path):
    options = ["optimizer.lr=0.1,0.2", "method=pb", "callbacks=none"]
    assert pipeback("train", *TINY, *options, "-m", cwd=tmp_path).returncode == 0
    names = {path.name for path in (tmp_path / "outputs" / "train" / "digits").iterdir() if path.is_dir()}
    assert names == {"pb-seed0-lr0.1", "pb-seed0-lr0.2"}


def test_sweep_by_joblib(tmp_path):
    """Two processes: as many bits as in this one."""
    options = [*TINY, "method=sgd,pb", "callbacks=minimal", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    with joblib_processes(), forks.of_joblib():
        done = pipeback("train", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert pipeback("train", *TINY, "method=pb", "callbacks=minimal", "out=here", cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "outputs" / "train" / "digits" / "pb-seed0") == numbers(tmp_path / "here")


@pytest.mark.parametrize("swept", ["pb", rare("sgd,pb")])
def test_sweep_over_two_devices(swept, tmp_path, monkeypatch):
    """Each run starts its processes, and what is validated after them goes into the same log."""
    fork_for_spawn(monkeypatch)
    options = [*TINY, f"method={swept}", "callbacks=minimal", "-m", "trainer.devices=2"]
    done = pipeback("train", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert pipeback("train", *TINY, "method=pb", "callbacks=minimal", "out=here", cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "outputs" / "train" / "digits" / "pb-seed0") == numbers(tmp_path / "here")
    for run in (tmp_path / "outputs" / "train" / "digits").glob("*-seed0"):
        assert facts(run)["runtime"] == "2 processes"


def test_cfg_job(tmp_path):
    done = pipeback("train", "experiment=digits", "method=pb", "--cfg", "job", cwd=tmp_path)
    found = yaml.safe_load(done.stdout)
    assert done.returncode == 0 and found["method"]["name"] == "pb" and found["data"]["name"] == "digits"
    assert list(tmp_path.iterdir()) == []


def test_offline_wandb_follows_the_conventions(tmp_path):
    pytest.importorskip("wandb")
    from pipeback.recipes.reports.sources import read

    options = ["-m", "logger=wandb_offline", "method=pb", "seed=0,1", "callbacks=minimal"]
    done = pipeback("train", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs, _ = read([tmp_path / "outputs" / "train"])
    assert sorted(run.facts["seed"] for run in runs) == [0, 1]  # in one process, and each a run of its own
    for run in runs:
        assert run.facts["delays"] == [8, 6, 4, 2, 0]
        assert run.last("samples_seen") == 96 and run.last("val/accuracy") > 0


# -- the user's own ----------------------------------------------------------------------------------------------------

OWN = """
from lightning.pytorch import LightningDataModule
from torch import nn, randn, randint, Generator
from torch.utils.data import DataLoader, TensorDataset
from pipeback.recipes.tasks import Classification

def net(inputs, classes, width):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))

class Mine(Classification):
    metric = "val/loss"

class Noise(LightningDataModule):
    facts = {"inputs": 4, "classes": 3, "unasked": 5}
    def __init__(self, samples, batch_size):
        super().__init__()
        self.x, self.batch_size = randn(samples, 4, generator=Generator().manual_seed(0)), batch_size
    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, self.x.argmax(1) % 3), self.batch_size)
    val_dataloader = train_dataloader
"""


@pytest.fixture
def mine(tmp_path):
    """A folder with configs and a module of the user's."""
    for name, text in {
        "method/mine.yaml": "defaults: [pb, _self_]\nslack: 1\n",
        "model/net.yaml": "_target_: own_things.net\nwidth: 8\n",
        "data/noise.yaml": "_target_: own_things.Noise\nsamples: 64\n",
        "task/mine.yaml": "_target_: own_things.Mine\n",
        "optimizer/adam.yaml": "_target_: torch.optim.Adam\nlr: 1e-3\nwarmup: 2\n",
        "experiment/own.yaml": "# @package _global_\ndefaults:\n  - override /data: noise\n  - override /model: net\n"
        "name: own\nmethods: [sgd, mine]\n",
        "experiment/wrong.yaml": "# @package _global_\nname: wrong\ndata: {rot: 3}\n",
        "experiment/typo.yaml": "# @package _global_\nname: typo\nepoch: 3\n",
    }.items():
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / name).write_text(text)
    (tmp_path / "own_things.py").write_text(OWN)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("own_things", None)


@pytest.mark.parametrize("root", ["~/mine", "$HOME/mine", "${oc.env:HOME}/mine"])
def test_home_and_variables_are_expanded(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = pipeback("train", "experiment=fashion_mnist", f"data.root={root}", f"out={root}/runs", cwd=tmp_path)
    wanted = f"data.root={tmp_path}/mine has no FashionMNIST/raw/train-images-idx3-ubyte, packed by gzip or not; "
    assert done.returncode == 2 and f"{wanted}there is no folder {tmp_path}/mine" in done.stderr
    done = pipeback("train", *TINY, "epochs=1", f"out={root}/runs", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "mine" / "runs" / "metrics.csv").is_file()


def test_own_configs(mine):
    options = [
        "--config-dir",
        "my",
        "experiment=own",
        "method=mine",
        "task=mine",
        "optimizer=adam",
        "quick=true",
        "out=run",
    ]
    done = pipeback("train", *options, cwd=mine)
    assert done.returncode == 0, done.stderr
    known = facts(mine / "run")
    assert known["method"] == "mine" and known["delays"] == [2, 1, 0] and known["experiment"] == "own"
    assert known["epoch_samples"] == 64 and known["classes"] == 3 and known["metric"] == "val/loss"


@pytest.mark.parametrize(
    ("experiment", "message"), [("wrong", "did you mean 'data.root'"), ("typo", "did you mean 'epochs'")]
)
def test_a_mistake_in_an_own_file_is_found(experiment, message, mine):
    done = pipeback("train", "--config-dir", "my", f"experiment={experiment}", cwd=mine)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_method_of_another_package(tmp_path, monkeypatch):
    """Its entry point is an entry of the group, too."""
    theirs = EntryPoint("theirs", "pipeback.methods.pb:PipelinedBackpropagation", methods.GROUP)
    for module in (command, plugins):
        monkeypatch.setattr(module, "entry_points", lambda group: [theirs])
    done = pipeback("train", *TINY, "method=theirs", "+method.slack=1", "callbacks=none", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert facts(tmp_path / "run")["method"] == "theirs" and facts(tmp_path / "run")["delays"] == [4, 3, 2, 1, 0]


def test_installed_method(tmp_path):
    """method=installed method.name=... takes whatever is registered; the run is called by that name."""
    options = ["method=installed", "method.name=pb", "+method.slack=1", "callbacks=none"]
    done = pipeback("train", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert facts(tmp_path / "outputs" / "train" / "digits" / "pb-seed0")["delays"] == [4, 3, 2, 1, 0]


APP = """
import hydra
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from pipeback.recipes import build

@hydra.main(config_path="conf", config_name="main", version_base="1.3")
def main(config):
    data = build.data(config.data, batch_size=32, seed=0)
    optimizer, _ = build.optimizer(config.optimizer, update_size=4)
    task = build.task(config.task, build.model(config.model, data.facts, seed=0), optimizer)
    trainer = instantiate(config.trainer, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(task, datamodule=data)
    print(trainer.strategy.options.method, trainer.strategy.pipeline.delays, trainer.global_step)

main()
"""


def test_own_application_uses_our_groups(tmp_path):
    (tmp_path / "conf").mkdir()
    groups = [
        "data: digits",
        "model: residual_mlp",
        "task: classification",
        "optimizer: sgd",
        "method: pb",
        "trainer: cpu",
    ]
    (tmp_path / "conf" / "main.yaml").write_text(
        "hydra: {searchpath: ['pkg://pipeback.conf']}\n"
        "defaults:\n" + "".join(f"  - {each}\n" for each in groups) + "  - _self_\n"
        "epochs: 1\nmax_steps: null\nmicro_batch_size: 4\nvalidate_every: 1.0\ndata: {samples: 96}\nmodel: {depth: 2}\n"
    )
    (tmp_path / "app.py").write_text(APP)
    application = partial(runpy.run_path, "app.py", run_name="__main__")
    done = pipeback("method=pipedream_slack2", cwd=tmp_path, run=application)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PipeDream(slack=2, vertical_sync=False) [4, 2, 0] 3"


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], "unknown command 'foo'"),
        (["trian"], "did you mean 'train'?"),
        (["train", "data.rot=x"], "did you mean 'data.root'?"),
        (["train", "method.slak=1"], "did you mean 'method.slack'?"),
        (["train", "+method.slak=1"], "did you mean 'method.slack'?"),
        (["train", "optimizer.lrr=1"], "did you mean 'optimizer.lr'?"),
        (["train", "epoch=3"], "did you mean 'epochs'?"),
        (["train", "accelerator=cpu"], "did you mean 'trainer.accelerator'?"),
        (["train", "seeds=3"], "seeds is an option of `pipeback compare`"),
        (["train", "methods=[pb]"], "methods is an option of `pipeback compare`"),
        (["train", "method=cerebas"], "did you mean 'cerebras'?"),
        (["train", "experiment=digit"], "did you mean 'digits'?"),
        (["train", "trainer=gpuu"], "did you mean 'gpu'?"),
        (["train", "epochs=three"], "epochs: Value 'three' of type 'str' could not be converted to Integer"),
        (["train", "method.slack=x"], "method.slack: Value 'x'"),
        (["train", "model.depth=1.5"], "model.depth: Value '1.5'"),
        (["train", "epochs=0"], "epochs must be a whole number of at least 1, but is 0"),
        (["train", "validate_every=1.5"], "a fraction of an epoch, above 0 and up to 1.0"),
        (["train", "+trainer.max_epoch=3"], "Trainer has no option 'max_epoch'; did you mean 'max_epochs'?"),
        (["train", "seed=0,1"], "seed=0,1: several values are a sweep, which -m asks for"),
        (["train", "-m", "seed=0,1", "out=here"], "'out=here/${label}-seed${seed}'"),
        (["train", "nothing"], "cannot read nothing"),
        (["train", "ckpt_path=no/epoch=3.ckpt"], "ckpt_path=no/epoch=3.ckpt: there is no such file"),
        (["train", "--config-dir", "nowhere"], "not found"),
        (["train", "data.scaling=loud"], "data.scaling must be standard, unit or symmetric, but is 'loud'"),
        (["train", "method=lwp", "optimizer=adamw"], "SGD"),
        (["train", "model=transformer"], "model=transformer is for sequences of tokens"),
        (["train", "data.root=nowhere"], "data.root=nowhere: there is no digits.csv.gz"),
        (["train", "experiment=mnist"], "data.download=true"),
        (["train", "optimizer.name=SDG"], "did you mean 'SGD'?"),
        (["train", "optimizer.decay=cosin"], "optimizer.decay must be linear, cosine or null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_reads_well(arguments, message, tmp_path):
    done = pipeback(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 or arguments[0] != "train"  # else the usage follows
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_memory(tmp_path):
    options = ["experiment=streaming_gpt", "quick=true", "model.meta=true", *small("streaming_gpt")]
    streamed = ["trainer.strategy.store.store=disk:store", "callbacks=streaming", "out=run"]
    done = pipeback("train", *options, *streamed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("weights in files", "batch window", "held-out loss", "resident memory: at most", "written to run"):
        assert words in done.stdout
    assert (tmp_path / "run" / "weights" / "model.safetensors.index.json").is_file()
    done = pipeback("train", *options, "trainer.strategy.store.store=disk:other", "out=again", cwd=tmp_path)
    assert done.returncode == 2 and "enable_checkpointing=False, and pipeback.lightning.SaveWeights" in done.stderr
