"""Law: killed and resumed equals uninterrupted, bit for bit, with micro-batches in flight."""

import os
import signal
import subprocess
import sys
import warnings
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.helpers.choice import mostly_rare, rare
from tests.helpers.processes import forked
from tests.laws.cases import CASES, FEW, STAGES, network, usual
from tests.lightning.cases import Regression, dataset, dropout_network, loader, strategy, trainer, weights

BATCHES = 8


class Drawing(Regression):
    """Draws random numbers inside the stages, outside of them, and in the data."""

    def __init__(self, **options):
        super().__init__(dropout_network(), **options)
        self.scheduler = lambda o: {"scheduler": OneCycleLR(o, 0.02, total_steps=3 * BATCHES), "interval": "step"}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + 0.01 * torch.randn_like(x), y), batch_idx)


def shuffled(kind):
    return kind(dataset(BATCHES), batch_size=3, shuffle=True)


def checkpoints(folder, **options):
    return ModelCheckpoint(folder, save_top_k=-1, auto_insert_metric_name=False, filename="{epoch}-{step}", **options)


def fit(where, module, data, ckpt=None, seed=7, validated=2, **options):
    """validated: batches of 3 that are held out; less than one is no batch at all, but a loader."""
    pl.seed_everything(seed, verbose=False)
    run = trainer(where, max_epochs=3, enable_checkpointing=bool(options.get("callbacks")), **options)
    held_out = DataLoader(dataset(samples=int(3 * validated), batches=1), batch_size=3, drop_last=True)
    run.fit(module, data, held_out if validated else None, ckpt_path=ckpt)
    return run


def saved(folder):
    return sorted(folder.glob("*.ckpt"), key=lambda file: int(file.stem.split("-")[-1]))


@pytest.mark.parametrize(
    ("case", "size"),
    mostly_rare(product(CASES, (None, 2)), *((case, (None, 2)[n % 2]) for n, case in enumerate(FEW[::2]))),
)
def test_every_method_from_every_epochs_end(case, size, tmp_path):
    optimizer = usual(CASES[case](STAGES))
    whole = Regression(optimizer=optimizer)
    fit(strategy(CASES[case](STAGES), micro_batch_size=size), whole, loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    files = saved(tmp_path)
    assert len(files) == 3
    for file in files[:2]:
        resumed = Regression(network(seed=99), optimizer)
        fit(strategy(CASES[case](STAGES), micro_batch_size=size), resumed, loader(BATCHES), file, seed=8, callbacks=[])
        assert torch.equal(weights(whole), weights(resumed)), file


@pytest.mark.parametrize(
    ("size", "when", "kind"),
    mostly_rare(
        product([None, 1], ["train_epoch_end", "validation_end"], [DataLoader, StatefulDataLoader]),
        (None, "train_epoch_end", DataLoader), (None, "validation_end", StatefulDataLoader),
        (1, "train_epoch_end", StatefulDataLoader), (1, "validation_end", DataLoader),
    ),
)  # fmt: skip
def test_epoch_boundaries_with_everything_random(kind, when, size, tmp_path):
    saving = checkpoints(tmp_path, save_on_train_epoch_end=when == "train_epoch_end")
    whole = Drawing()
    fit(strategy("cerebras", micro_batch_size=size), whole, shuffled(kind), callbacks=[saving])
    for file in saved(tmp_path)[:2]:
        resumed = Drawing()
        fit(strategy("cerebras", micro_batch_size=size), resumed, shuffled(kind), file, seed=8, callbacks=[])
        assert torch.equal(weights(whole), weights(resumed)), file
        assert torch.equal(torch.stack(whole.losses[-len(resumed.losses) :]), torch.stack(resumed.losses))


@pytest.mark.parametrize("case", ["cerebras", rare("pipedream"), "pipedream_2bw", "pipemare-t3", rare("gpipe")])
def test_mid_epoch_with_a_loader_that_has_a_state(case, tmp_path):
    method = CASES[case](3)
    whole = Drawing()
    fit(strategy(method), whole, shuffled(StatefulDataLoader), callbacks=[checkpoints(tmp_path, every_n_train_steps=1)])
    files = saved(tmp_path)
    assert len(files) == 24
    for file in files[:-1:3] if case == "cerebras" else (files[2], files[12]):
        resumed = Drawing()
        fit(strategy(CASES[case](3)), resumed, shuffled(StatefulDataLoader), file, seed=8, callbacks=[])
        assert torch.equal(weights(whole), weights(resumed)), file
        assert torch.equal(torch.stack(whole.losses[-len(resumed.losses) :]), torch.stack(resumed.losses))


@pytest.mark.parametrize("case", ["cerebras", rare("pipedream")])
def test_where_nothing_is_left_to_train(case, tmp_path, recwarn):
    """Micro-batches in flight are finished, as they were without a stop."""
    whole = Regression()
    fit(strategy(CASES[case](3)), whole, loader(4), callbacks=[checkpoints(tmp_path, every_n_train_steps=1)])
    resumed = Regression(network(seed=99))
    fit(strategy(CASES[case](3)), resumed, loader(4), saved(tmp_path)[-1], callbacks=[])
    assert torch.equal(weights(whole), weights(resumed))
    assert not [each for each in recwarn if "other weights into the model" in str(each.message)]


def test_where_no_batch_is_left_to_cut_the_model_by(tmp_path):
    where = lambda method: strategy(method, module="self")  # noqa: E731
    for method, waits in (("pb", True), ("gpipe", False)):
        folder = tmp_path / method
        fit(where(method), Regression(), loader(4), callbacks=[checkpoints(folder, every_n_train_steps=1)])
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            fit(where(method), Regression(), loader(4), saved(folder)[-1], callbacks=[])
        told = [each for each in heard if "none was left to train on" in str(each.message)]
        assert bool(told) == waits
        run = trainer(where(method), max_epochs=4)
        run.fit(Regression(), loader(4), ckpt_path=saved(folder)[-1])
        assert run.global_step == 16


@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("validated", [2, 0.7])
def test_before_a_validation_that_drains(when, validated, tmp_path):
    """Lightning leaves that validation out when it resumes, and always if its loader has dropped the only batch."""
    drains = lambda: strategy("pb", micro_batch_size=1, drain="validation")  # noqa: E731
    options = {"val_check_interval": 2, "validated": validated}
    data = lambda: StatefulDataLoader(dataset(4), batch_size=3)  # noqa: E731
    whole = Regression()
    fit(drains(), whole, data(), callbacks=[checkpoints(tmp_path, every_n_train_steps=1)], **options)
    resumed = Regression(network(seed=99))
    fit(drains(), resumed, data(), saved(tmp_path)[when], callbacks=[], **options)
    assert torch.equal(weights(whole), weights(resumed))


def test_mid_epoch_without_such_a_loader_warns(tmp_path):
    fit(strategy(), Regression(), loader(BATCHES), callbacks=[checkpoints(tmp_path, every_n_train_steps=3)])
    with pytest.warns(UserWarning, match="dataloader is not resumable"):
        fit(strategy(), Regression(), loader(BATCHES), saved(tmp_path)[0], callbacks=[])


def test_between_the_steps_of_an_accumulation(tmp_path):
    whole = Regression()
    options = {"accumulate_grad_batches": 6}
    fit(strategy("pipedream_2bw"), whole, loader(12), callbacks=[checkpoints(tmp_path)], **options)
    resumed = Regression()
    fit(strategy("pipedream_2bw"), resumed, loader(12), saved(tmp_path)[0], callbacks=[], **options)
    assert torch.equal(weights(whole), weights(resumed))


class Kill(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == 13:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder):
    torch.set_num_threads(1)
    kept = [checkpoints(folder, every_n_train_steps=5), Kill()]
    fit(strategy("cerebras"), Drawing(), shuffled(StatefulDataLoader), callbacks=kept)


def test_killed_and_resumed_in_another_process(tmp_path):
    torch.set_num_threads(1)
    process = forked().Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (*_, last) = saved(tmp_path)
    assert last.stem == "1-10"
    whole, resumed = Drawing(), Drawing()
    fit(strategy("cerebras"), whole, shuffled(StatefulDataLoader), callbacks=[])
    fit(strategy("cerebras"), resumed, shuffled(StatefulDataLoader), last, seed=8, callbacks=[])
    assert torch.equal(weights(whole), weights(resumed))


def test_plain_lightning_opens_it_and_the_other_way_round(tmp_path):
    ours = Regression()
    fit(strategy("cerebras"), ours, loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    file = saved(tmp_path)[0]
    content = torch.load(file, weights_only=True)
    assert content["pipeback"]["state"]["format"] == 2
    names = [name for tensors in content["pipeback"]["state"]["stages"] for name in tensors]
    assert not [name for name in names if name.startswith(("weight/", "buffer/", "optimizer/"))]  # stored once
    assert [name for name in names if name.startswith("flight/")]
    plain = Regression(network(seed=99))
    fit(None, plain, loader(BATCHES), file, callbacks=[])
    assert torch.isfinite(weights(plain)).all() and len(plain.losses) == 2 * BATCHES
    # a checkpoint of plain Lightning has nothing in flight
    other = tmp_path / "plain"
    fit(None, Regression(), loader(BATCHES), callbacks=[checkpoints(other)])
    with pytest.warns(UserWarning, match="the pipeline fills anew"):
        fit(strategy("cerebras"), Regression(), loader(BATCHES), saved(other)[0], callbacks=[])


def test_opens_without_pipeback(tmp_path):
    fit(strategy("cerebras"), Regression(), loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    code = (
        "import sys, torch; assert 'pipeback' not in sys.modules; "
        "c = torch.load(sys.argv[1], weights_only=True); print(sorted(c['state_dict'])[0], 'pipeback' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(saved(tmp_path)[0])], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.stdout.split() == ["model.0.0.bias", "False"], found.stderr


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "sgd"])
def test_the_optimizers_state_is_plain_lightnings(optimizer, tmp_path):
    found = {}
    for name, where in (("plain", None), ("ours", strategy("sgd"))):
        fit(where, Regression(optimizer=optimizer), loader(BATCHES), callbacks=[checkpoints(tmp_path / name)])
        found[name] = torch.load(saved(tmp_path / name)[-1], weights_only=True)["optimizer_states"]
    (a,), (b,) = found["plain"], found["ours"]
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for n, state in a["state"].items():
        assert state.keys() == b["state"][n].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(b["state"][n][k])) for k, v in state.items())


def test_another_method_is_refused(tmp_path):
    fit(strategy("cerebras"), Regression(), loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    with pytest.raises(
        ValueError, match="the state belongs to method Cerebras .*, the pipeline runs PipelinedBackprop"
    ):
        fit(strategy("pb"), Regression(), loader(BATCHES), saved(tmp_path)[0], callbacks=[])


def test_the_last_checkpoint_keeps_what_is_in_flight_and_fit_drains(tmp_path):
    module = Regression()
    run = fit(strategy("pb"), module, loader(BATCHES), callbacks=[checkpoints(tmp_path)])
    last = torch.load(saved(tmp_path)[-1], weights_only=True)
    flights = [name for t in last["pipeback"]["state"]["stages"] for name in t if name.startswith("flight/")]
    assert flights
    assert not torch.equal(last["state_dict"]["model.0.0.weight"], module.model[0][0].weight)
    run.save_checkpoint(tmp_path / "after.ckpt")
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert not [n for t in after["pipeback"]["state"]["stages"] for n in t if n.startswith("flight/")]
    assert torch.equal(after["state_dict"]["model.0.0.weight"], module.model[0][0].weight)


def test_training_goes_on_past_the_end(tmp_path):
    """More epochs from the last checkpoint are more epochs in one go."""
    whole, first = Regression(), Regression()
    fit(strategy("pb"), whole, loader(BATCHES), callbacks=[])
    pl.seed_everything(7, verbose=False)
    trainer(strategy("pb"), max_epochs=2, enable_checkpointing=True, callbacks=[checkpoints(tmp_path)]).fit(
        first, loader(BATCHES), loader(2)
    )
    second = Regression()
    fit(strategy("pb"), second, loader(BATCHES), saved(tmp_path)[-1], callbacks=[])
    assert torch.equal(weights(whole), weights(second))


def test_a_run_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*(num_workers|logging interval|LeafSpec|val_dataloader).*")
        fit(strategy("cerebras"), Regression(), loader(BATCHES), callbacks=[], log_every_n_steps=1)


def test_a_compiled_model_resumes_from_a_checkpoint_without_its_names(tmp_path):
    """The stages train without torch.compile; the checkpoint has the names that the model had before."""

    def fit(compiled, epochs, resumed=None):
        module = Regression()
        if compiled:
            module.model = torch.compile(module.model, backend="aot_eager")
        made = trainer(strategy("pb"), max_epochs=epochs, default_root_dir=tmp_path)
        made.fit(module, loader(), ckpt_path=resumed)
        return made, module

    with pytest.warns(UserWarning, match="torch.compile has compiled Regression.model"):
        made, _ = fit(True, 1)
    made.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.warns(UserWarning, match="torch.compile has compiled Regression.model"):
        _, found = fit(True, 2, tmp_path / "one.ckpt")
    _, wanted = fit(False, 2, tmp_path / "one.ckpt")
    assert list(found.state_dict()) == list(wanted.state_dict())
    assert torch.equal(weights(found), weights(wanted))
