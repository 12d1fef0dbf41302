"""Laws for models as they are: without delay plain Lightning, with any method the core's pipeline, bit for bit."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

import pipeback
from pipeback.lightning.find_stages import find
from pipeback.lightning.streamed_model import StreamedModel
from pipeback.splitting.traced_model import Arguments
from tests.helpers.choice import mostly_rare
from tests.laws.cases import OPTIMIZERS
from tests.lightning import ranks
from tests.lightning.cases import strategy, trainer, weights
from tests.lightning.models import CASES, Case, Inside, Recurrent, Texts, case, data, gpt2

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use_cache=True"),
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
]
needs_transformers = pytest.mark.skipif("gpt2" not in CASES, reason="transformers is not installed")
SOME = [name for name in ("recurrent", "unet", "transformer", "t5") if name in CASES]


def first(count, rows):
    """Each row once; all but the first ones are in the soak."""
    return mostly_rare([row for n, row in enumerate(rows) if row not in rows[:n]], *rows[:count])


@pytest.fixture
def slow_path():
    """In evaluation mode torch's encoder has a fast path with zeros in padded places, but not where it is followed."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def fitted(name, where=None, optimizer="momentum", batches=6, samples=4, val=False, ckpt=None, **options):
    module = case(name, optimizer)
    made = trainer(where, **{"max_epochs": 1, **options})
    made.fit(module, data(name, batches, samples), data(name, 2, samples) if val else None, ckpt_path=ckpt)
    return module


def same(a, b):
    assert a.losses and torch.equal(torch.stack(a.losses), torch.stack(b.losses))
    assert torch.equal(weights(a), weights(b))
    assert not a.values or torch.equal(torch.stack(a.values), torch.stack(b.values))


@pytest.mark.parametrize(
    ("name", "method"), first(len(CASES) + 2, [*((n, "sgd") for n in CASES), *((n, "gpipe") for n in (*SOME, *CASES))])
)
def test_no_delay_is_plain_lightning(name, method):
    same(fitted(name, val=True), fitted(name, strategy(method), val=True))


def pushed(name, method, **options):
    """The losses and the model of a core pipeline that is given the same micro-batches."""
    module = case(name)
    outside = {
        "recurrent": cross_entropy, "unet": cross_entropy, "resnet": cross_entropy,
        "transformer": mse_loss,
        "gpt2, loss outside": lambda out, y: cross_entropy(out.logits.flatten(0, 1), y.flatten()),
    }  # fmt: skip
    pipe, losses = None, []
    for batch in data(name):
        if name == "transformer":
            asked = []
            module.model.forward = lambda *args, asked=asked, **kwargs: asked.append(Arguments(args, kwargs))
            with pytest.raises(AttributeError):
                module.loss(batch)
            del module.model.forward
            x = asked[0]
            y = x.args[0].flip(1)
        elif name == "gpt2, loss outside":
            y = batch.pop("labels")
            x = batch
        else:
            x, y = (batch, None) if isinstance(batch, dict) else batch
        if pipe is None:
            loss = outside.get(name, lambda out, _: out.loss)
            pipe = pipeback.Pipeline(
                module.model, loss=loss, optimizer=OPTIMIZERS["momentum"], method=method, example=x, **options
            )
        losses.append(pipe.push(x, y))
    pipe.drain()
    return torch.stack(losses), pipe


@pytest.mark.parametrize(
    ("name", "method"), first(4, [*((n, "pb") for n in SOME), *((n, m) for n in CASES for m in ("pb", "cerebras"))])
)
def test_delay_is_push(name, method):
    losses, pipe = pushed(name, method)
    assert pipe.stages > 2
    module = fitted(name, strategy(method))
    assert torch.equal(losses, torch.stack(module.losses))
    for a, b in zip(pipe.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "method", "size"), first(4, [
    ("gpt2", "cerebras", 2), ("unet", "pipedream", 1), ("t5", "pb", None), ("recurrent", "gpipe", 2),
    *((name, "pb", None) for name in CASES),
    *((name, "gpipe", 2) for name in SOME),
]) if "gpt2" in CASES else [])  # fmt: skip
def test_a_store_is_resident(name, method, size, slow_path):
    given = {"micro_batch_size": size}
    same(
        fitted(name, strategy(method, **given), val=True, batches=4),
        fitted(name, strategy(method, store="host", **given), val=True, batches=4),
    )


def test_a_disk_store_is_resident(tmp_path):
    same(
        fitted("recurrent", strategy("pb"), val=True),
        fitted("recurrent", strategy("pb", store=f"disk:{tmp_path}"), val=True),
    )


@pytest.mark.parametrize("name", first(2, SOME))
def test_slices_are_pushes(name):
    """gpipe over slices is one batch, but for rounding."""
    plain, ours = fitted(name), fitted(name, strategy("gpipe", micro_batch_size=2))
    assert torch.allclose(weights(plain), weights(ours), atol=1e-4)
    assert not torch.equal(weights(plain), weights(case(name)))


@pytest.mark.parametrize("name", first(2, SOME))
def test_accumulation(name):
    same(fitted(name, accumulate_grad_batches=2), fitted(name, strategy("gpipe"), accumulate_grad_batches=2))
    counting = fitted(name, strategy("pipedream_2bw", stages=2), accumulate_grad_batches=2)
    assert torch.isfinite(weights(counting)).all()


def test_clipping():
    losses, _ = pushed("unet", "pb", clip_norm=pipeback.Clipping(value=0.001))
    module = fitted("unet", strategy("pb"), gradient_clip_val=0.001, gradient_clip_algorithm="value")
    assert torch.equal(losses, torch.stack(module.losses))
    same(
        fitted("unet", gradient_clip_val=0.001, gradient_clip_algorithm="value"),
        fitted("unet", strategy("sgd"), gradient_clip_val=0.001, gradient_clip_algorithm="value"),
    )


STAGES = [("layer", ()), ("sublayer", ()), (3, ()), ("block", ()), (["lstm", "head"], ()), ("auto", ["lstm"])]


@pytest.mark.parametrize(("stages", "leaves"), STAGES)
def test_stages(stages, leaves):
    name = "t5" if stages == "block" and "t5" in CASES else "recurrent"
    where = strategy("sgd", stages=pipeback.Splitting(stages, leaves=leaves))
    same(fitted(name), fitted(name, where))


RESUMED = [*((name, "pb", 1) for name in SOME), ("unet", "pipedream_2bw", 2)]


@pytest.mark.parametrize(
    ("name", "method", "accumulate", "store"),
    mostly_rare(
        ((*row, store) for row in RESUMED for store in (None, "host")),
        *((*row, (None, "host")[n % 2]) for n, row in enumerate(RESUMED)),
    ),
)
def test_resume(name, method, accumulate, store, tmp_path):
    """From the middle of an epoch, with micro-batches in flight."""
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    given = {"store": store, "stages": 2 if accumulate > 1 else "auto"}
    whole = fitted(name, strategy(method, **given), "adamw", **options)
    kept = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    first = case(name, "adamw")
    stopped = trainer(
        strategy(method, **given), callbacks=[kept], enable_checkpointing=True, max_steps=4,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    stopped.fit(first, data(name))
    path = tmp_path / "step=4.ckpt"
    second = fitted(name, strategy(method, **given), "adamw", ckpt=path, **options)
    assert torch.equal(weights(whole), weights(second))
    assert torch.equal(torch.stack(whole.losses)[-len(second.losses) :], torch.stack(second.losses))
    plain = case(name, "adamw")
    plain.load_state_dict(torch.load(path)["state_dict"])
    trainer(max_epochs=2).fit(plain, data(name), ckpt_path=path)  # opens in plain Lightning


def test_a_checkpoint_before_the_first_call(tmp_path):
    """What waits for the first call is not lost where it is saved again at once."""
    kept = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = case("recurrent")
    trainer(strategy("pb"), callbacks=[kept], enable_checkpointing=True, max_steps=4).fit(module, data("recurrent"))

    class Again(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "again.ckpt")

    found = []
    for path in ("step=4.ckpt", "again.ckpt"):
        more = case("recurrent")
        trainer(strategy("pb"), callbacks=[Again()], max_epochs=2).fit(
            more, data("recurrent"), ckpt_path=tmp_path / path
        )
        found.append(more)
    same(*found)


@needs_transformers
def test_the_structure_comes_without_gradients_too():
    """Within training_step, in evaluation mode, of streamed stages."""

    class Teacher(Case):
        def loss(self, batch):
            self.model.eval()
            with torch.no_grad():
                logits = self.model(input_ids=batch["input_ids"]).logits
            self.model.train()
            return self.model(**batch).loss + 0 * logits.sum()

    found = []
    for where in (None, strategy("sgd"), strategy("sgd", store="host")):
        module = Teacher(gpt2)
        trainer(where, max_epochs=1).fit(module, data("gpt2"))
        found.append(module)
    same(*found[:2])
    same(*found[1:])


# -- several devices ---------------------------------------------------------------------------------------------------


def shared(name, devices, **options):
    options = {"val": partial(data, name, 2), "max_epochs": 1, **options}
    return ranks.result(devices=devices, module=partial(case, name), data=partial(data, name), **options)


DEVICES = [
    ("recurrent", 3, {"method": "cerebras"}),
    ("unet", 2, {"method": "pb", "num_sanity_val_steps": 1}),
    ("gpt2", 2, {"method": "pb"}),
    ("t5", 2, {"method": "gpipe", "given": {"store": "host", "micro_batch_size": 2}}),
    ("llama", 2, {"method": "pb", "given": {"stages": 3}, "precision": "bf16-true"}),
]


@pytest.mark.parametrize(("name", "devices", "options"), first(2, [row for row in DEVICES if row[0] in CASES]))
def test_devices_are_one_device(name, devices, options, crew):
    wanted = shared(name, 1, **options)
    for rank, found in enumerate(crew.ranks(devices).run(shared, name, devices, **options)):
        assert ranks.differences(found, wanted) == [], rank


def test_devices_go_on_from_one_device_in_the_middle_of_an_epoch(crew, tmp_path):
    kept = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = case("recurrent")
    trainer(strategy("pb"), callbacks=[kept], enable_checkpointing=True, max_steps=4).fit(module, data("recurrent"))
    wanted = shared("recurrent", 1, method="pb")
    for found in crew.ranks(2).run(shared, "recurrent", 2, method="pb", ckpt=tmp_path / "step=4.ckpt"):
        assert all(torch.equal(v, found["weights"][k]) for k, v in wanted["weights"].items())


def test_fewer_stages_than_devices(crew):
    for raised in crew.ranks(3).run(failure, "recurrent", 3, given={"stages": 2}):
        assert "2 stages for 3 devices; use as many devices or less" in raised


def failure(*args, **options):
    with pytest.raises((ValueError, RuntimeError)) as found:
        shared(*args, **options)
    return str(found.value)


@needs_transformers
def test_caches_are_left_out():
    found = []
    for cache in (False, True):
        module = Inside(partial(gpt2, cache=cache))
        where = strategy("sgd")
        if cache:
            with pytest.warns(UserWarning, match="GPT2LMHeadModel has use_cache=True.*use_cache=False in its config"):
                trainer(where, max_epochs=1).fit(module, data("gpt2"))
        else:
            trainer(where, max_epochs=1).fit(module, data("gpt2"))
        assert module.model.config.use_cache is cache
        found.append(module)
    same(*found)

    class Asking(Case):
        def loss(self, batch):
            return self.model(**batch, use_cache=True).loss

    asking = Asking(gpt2)
    trainer(strategy("sgd"), max_epochs=1).fit(asking, data("gpt2"))
    assert all(value.isfinite().all() for value in asking.state_dict().values())


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_model_from_the_meta_device(store, tmp_path):
    with torch.device("meta"):
        module = case("recurrent")
    where = strategy("pb", store=f"disk:{tmp_path}" if store == "disk" else store)
    trainer(where, max_epochs=1).fit(module, data("recurrent"), data("recurrent", 2))
    assert torch.isfinite(torch.stack(module.losses)).all() and len(module.values) == 2
    if store == "host":
        assert torch.isfinite(weights(module)).all()


def test_layers_visit_the_device_before_there_is_a_pipeline():
    """As validation does before fit, were the device another one than the host."""
    module = case("recurrent").eval()
    x, _ = next(iter(data("recurrent")))
    with torch.no_grad():
        wanted = module.model(x)
        visits = StreamedModel(find(module, "model"), torch.device("cpu"))
        with visits._visiting():
            assert torch.equal(wanted, Recurrent.forward(module.model, x))
        visits.end()
        assert torch.equal(wanted, module.model(x))


class Some(Texts):
    """Padded in some batches only."""

    def __getitem__(self, n):
        found = super().__getitem__(n)
        if n // 4 % 2:
            return found
        return {"input_ids": self.x[n], "attention_mask": torch.ones(7, dtype=torch.long), "labels": self.x[n]}


@needs_transformers
@pytest.mark.parametrize("name", first(1, [name for name in ("gpt2", "llama", "t5") if name in CASES]))
def test_padding_comes_and_goes(name):
    """transformers leaves masks out that hide nothing."""
    found = []
    for where in (None, strategy("sgd"), strategy("gpipe")):
        module = case(name)
        trainer(where, max_epochs=2).fit(module, DataLoader(Some(24), 4), DataLoader(Some(8), 4))
        found.append(module)
    same(*found[:2])
    same(*found[1:])
