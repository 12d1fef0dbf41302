"""Law: a Trainer whose devices compute stages together equals one device within rounding, in float64."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import pipeback
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.lightning import ranks
from tests.lightning.test_processes_resume import content
from tests.processes import tensor_families
from tests.processes.tensor_cases import PERCEPTRON, perceptron

pytestmark = pytest.mark.filterwarnings("ignore")
WITHIN = 1e-10


def loader(batches=12, samples=4, shuffle=False, kind=DataLoader):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(batches * samples, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    return kind(TensorDataset(draw(), draw()), batch_size=samples, shuffle=shuffle)


def fit(devices, tensor, plan=PERCEPTRON, given=None, module=None, method="pb", **named):
    given = dict(given or {})
    if tensor > 1:
        given["tensor_parallel"] = tensor if plan is None else pipeback.TensorParallel(tensor, plan)
    named.setdefault("data", loader)
    module = module or partial(ranks.Whole, perceptron, scheduler=ranks.cycle)
    return ranks.fit(method, devices, module, given=given, **named)


def result(*args, **named):
    return ranks.outcome(*fit(*args, **named))


def far(found, wanted):
    """Names of what differs by more than rounding."""
    odd = sorted(set(wanted["weights"]) ^ set(found["weights"])) + sorted(
        set(wanted["metrics"]) ^ set(found["metrics"])
    )
    close = partial(torch.allclose, rtol=0, atol=WITHIN)
    odd += [k for k, v in wanted["weights"].items() if not close(found["weights"][k].double(), v.double())]
    odd += [k for k, v in wanted["metrics"].items() if not abs(found["metrics"][k] - v) <= WITHIN * max(1, abs(v))]
    if found["losses"] is not None and not close(found["losses"], wanted["losses"]):
        odd.append("losses")
    return odd + ([] if found["step"] == wanted["step"] else ["step"])


MESHES = [(2, 2), (4, 2)]
CASES = {
    "pb": dict(val=partial(loader, 3), val_check_interval=0.5),
    "cerebras, clipped slices": dict(method="cerebras", given={"micro_batch_size": 2}, gradient_clip_val=0.05),
    "pipedream, drained": dict(method="pipedream", given={"drain": "validation"}, val=partial(loader, 2),
                               val_check_interval=0.5),
    "gpipe, accumulated": dict(method="gpipe", given={"micro_batch_size": 2}, accumulate_grad_batches=3),
    "shuffled, a scheduler of metrics": dict(
        data=partial(loader, shuffle=True), max_epochs=3,
        module=partial(ranks.Whole, perceptron, scheduler=ranks.plateau_of_error),
    ),
    "host": dict(given={"store": "host"}),
    "recompute": dict(given={"activations": "recompute"}, precision="64-true"),
}  # fmt: skip


ALL = [(case, mesh) for case in CASES for mesh in MESHES]


@pytest.mark.parametrize(("case", "mesh"), mostly_rare(ALL, ALL[0], ALL[3], ALL[4]), ids=str)
def test_devices_that_compute_together_are_one_device(case, mesh, crew):
    devices, tensor = mesh
    wanted = result(1, 1, **CASES[case])
    for rank, found in enumerate(crew.ranks(devices).run(result, devices, tensor, **CASES[case])):
        assert far(found, wanted) == [], rank
        assert (found["losses"] is not None) == (rank < tensor)


def test_a_store_on_disk(tmp_path, crew):
    wanted = result(1, 1)
    for found in crew.ranks(4).run(result, 4, 2, given={"store": f"disk:{tmp_path}"}):
        assert far(found, wanted) == []


class LanguageModel(pl.LightningModule):
    """A model of transformers, with the plan of its family; its stages are traced."""

    def __init__(self, build):
        super().__init__()
        self.model, self.losses = build(), []

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        loss = nn.functional.cross_entropy(self.model(tokens).logits.flatten(0, 1), target.flatten())
        self.losses += [loss.detach()] * self.training
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tokens(batches=8, samples=2):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, 11, (batches * samples, 5), generator=generator)  # noqa: E731
    return DataLoader(TensorDataset(draw(), draw()), batch_size=samples)


@pytest.mark.parametrize("family", ["gpt2", rare("llama"), rare("mixtral")])
def test_known_families(family, crew):
    """Experts are kept whole by a trace; everything else is as on one device."""
    build = getattr(tensor_families, family)
    blocks = [path for path, m in build().named_modules() if type(m).__name__ == "MixtralSparseMoeBlock"]
    options = dict(plan=None, module=partial(LanguageModel, build), data=tokens, val=partial(tokens, 2), max_epochs=1)
    options["given"] = {"stages": pipeback.Splitting(leaves=blocks)}
    wanted = result(1, 1, **options)
    for found in crew.ranks(4).run(result, 4, 2, **options):
        assert far(found, wanted) == []


def saving(folder):
    return ModelCheckpoint(
        folder, save_top_k=-1, auto_insert_metric_name=False, filename="{step}", every_n_train_steps=5
    )


def run(folder, devices, tensor, ckpt=None, activations="recompute", **options):
    """Two epochs of twelve batches, with micro-batches in flight at every checkpoint."""
    callbacks = [] if folder is None else [saving(folder)]
    options.setdefault("data", partial(loader, shuffle=True, kind=StatefulDataLoader))
    return result(
        devices, tensor, given={"activations": activations}, callbacks=callbacks, enable_checkpointing=bool(callbacks),
        ckpt=ckpt, val=partial(loader, 2), **options,
    )  # fmt: skip


def near(found, wanted, where=""):
    """Raise where two checkpoints differ by more than rounding, or in their form."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            near(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
            near(a, b, f"{where}/{n}")
    elif isinstance(wanted, torch.Tensor) and wanted.is_floating_point():
        assert torch.allclose(found, wanted, rtol=0, atol=WITHIN), where
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    else:
        assert found == (pytest.approx(wanted, abs=WITHIN) if isinstance(wanted, float) else wanted), where


@pytest.mark.soak
@pytest.mark.parametrize("method", ["cerebras", "pipedream"])
def test_a_checkpoint_with_activations_in_flight_resumes_on_as_many_shards(method, tmp_path, crew):
    wanted = run(None, 1, 1, activations="device", method=method)
    for found in crew.ranks(4).run(run, tmp_path, 4, 2, activations="device", method=method):
        assert far(found, wanted) == []
    for devices, name in ((2, "5.ckpt"), (4, "15.ckpt")):
        options = dict(ckpt=tmp_path / name, method=method, activations="device")
        for found in crew.ranks(devices).run(run, None, devices, 2, **options):
            rest = wanted["losses"][int(name[:-5]) :]
            assert far({**found, "metrics": {}}, {**wanted, "metrics": {}, "losses": rest}) == [], devices


@pytest.mark.parametrize("method", ["cerebras", rare("pipedream")])
def test_a_checkpoint_is_that_of_one_device_and_resumes_on_any_mesh(method, tmp_path, crew):
    one, several = tmp_path / "one", tmp_path / "several"
    wanted = run(one, 1, 1, method=method)
    for found in crew.ranks(4).run(run, several, 4, 2, method=method):
        assert far(found, wanted) == []
    names = sorted(file.name for file in one.glob("*.ckpt"))
    assert names == sorted(file.name for file in several.glob("*.ckpt")) == ["10.ckpt", "15.ckpt", "20.ckpt", "5.ckpt"]
    for name in names:
        near(content(several / name), content(one / name))
    for devices, tensor, folder in ((1, 1, several), (2, 2, several), (4, 2, one), (2, 1, several)):
        options = dict(ckpt=folder / "5.ckpt", method=method)
        where = crew.ranks(devices) if devices > 1 else None
        args = (None, devices, tensor)
        for found in where.run(run, *args, **options) if where else [run(*args, **options)]:
            rest = wanted["losses"][5:]  # a mean over the epoch begins anew
            assert far({**found, "metrics": {}}, {**wanted, "metrics": {}, "losses": rest}) == [], (devices, tensor)


class Heads(nn.Module):
    """Attention that counts its heads, of which a rank has some."""

    def __init__(self, width=8, heads=4):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        shape = (*x.shape[:-1], self.heads, self.size)
        q, k, v = (layer(x).view(shape) for layer in (self.query, self.key, self.value))
        return x + self.out((q.sigmoid() * k.tanh() * v).flatten(-2))


def attentive():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Heads(), nn.Tanh(), Heads(), nn.Linear(8, 6)).double()


class Itself(ranks.Whole):
    """Cuts its modules itself, as for Lightning's ModelParallelStrategy; on one device it has no mesh."""

    def __init__(self, before=True):
        super().__init__(nn.Identity, scheduler=ranks.cycle)
        self.before = before

    def configure_model(self):
        if not isinstance(self.model, nn.Identity):
            return
        self.model = attentive()
        if self.device_mesh is None:
            return
        assert self.device_mesh["data_parallel"].size() == 1
        mesh = self.device_mesh["tensor_parallel"]
        for layer in (self.model[1], self.model[3]):
            if self.before:
                layer.heads //= mesh.size()
            plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(layer, mesh, {**plan, "out": RowwiseParallel()})
            if not self.before:
                layer.heads //= mesh.size()
        parallelize_module(self.model[4], mesh, ColwiseParallel(output_layouts=Replicate()))


def itself(devices, tensor, **options):
    """The fit, and what the whole module computes afterwards by itself."""
    run, module = fit(devices, tensor, None, val=partial(loader, 2), **options)
    heads = [layer.heads for layer in (module.model[1], module.model[3])]
    with torch.no_grad():
        output = module.model.eval()(torch.ones(2, 6, dtype=torch.float64))
    return ranks.outcome(run, module), heads, output


@pytest.mark.parametrize(("mesh", "before"), diagonal(MESHES, [True, False]))
def test_a_module_that_cuts_itself(before, mesh, crew):
    options = dict(module=partial(Itself, before))
    wanted, heads, output = itself(1, 1, **options)
    for result in crew.ranks(mesh[0]).run(itself, *mesh, **options):
        assert far(result[0], wanted) == []
        assert result[1] == heads == [4, 4]
        assert torch.allclose(result[2], output, rtol=0, atol=WITHIN)
