"""Bad input: one clear error that names the cure, before half a step is trained."""

import copy
import re
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.lightning import PipelineMonitor, PipelineStrategy
from tests.helpers.choice import rare
from tests.helpers.processes import in_a_new_process, printed
from tests.laws.cases import network
from tests.lightning.cases import Regression, dropout_network, loader, strategy, trainer, weights


def refused(module, message, where=None, error=(ValueError, TypeError), data=None, **options):
    before = weights(module)
    with pytest.raises(error, match=message):
        trainer(where or strategy("pb"), **options).fit(module, loader() if data is None else data)
    assert torch.equal(before, weights(module)), "half a step was trained"


def test_manual_optimization():
    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    refused(Manual(), "Manual uses manual optimization.*use automatic optimization: return the loss")


def test_several_optimizers():
    class Several(Regression):
        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model[0], self.model[1])]

    refused(Several(), "pipeback trains with one optimizer: return one, with several parameter groups")


def test_no_optimizer():
    class Without(Regression):
        def configure_optimizers(self):
            return None

    refused(Without(), "holds no weight of 'model'; return one over self.parameters\\(\\)")


def test_lbfgs():
    class Quasi(Regression):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    refused(Quasi(), "LBFGS, which evaluates the loss several times per step.*use SGD or Adam")


class Elsewhere(Regression):
    def __init__(self):
        super().__init__()
        self.net = self._modules.pop("model")

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])


def test_no_model():
    message = "Elsewhere.model does not exist.*with trainable weights are net.*PipelineStrategy\\(module='net'\\)"
    refused(Elsewhere(), message, strategy("pb", module="model"))
    found = []
    for cure in ({"module": "net"}, {}):
        module = Elsewhere()
        trainer(strategy("pb", **cure)).fit(module, loader())
        found.append(weights(module))
    assert torch.equal(*found)


def test_model_is_no_module():
    class Odd(Elsewhere):
        model = staticmethod(torch.relu)

    refused(Odd(), "Odd.model is no module", strategy("pb", module="model"))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.second(self.first(x))


def test_a_model_that_is_no_sequence_is_followed():
    class Own(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    for model in (Residual(), Own(nn.Linear(6, 6))):
        plain, ours = Regression(copy.deepcopy(model)), Regression(model)
        trainer().fit(plain, loader())
        trainer(strategy("sgd")).fit(ours, loader())
        assert torch.equal(weights(plain), weights(ours))


def test_a_list_has_no_forward():
    class Listed(Regression):
        def training_step(self, batch, batch_idx):
            return mse_loss(self.model[0](batch[0]), batch[1])

    refused(Listed(nn.ModuleList([nn.Linear(6, 6)])), "'model' \\(ModuleList\\) has no forward.*nn.Sequential")


def test_the_body_inside_the_model():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return self.body(x.flatten(1)) * 1.0

    plain, ours = Regression(Wrapped()), Regression(Wrapped())
    trainer().fit(plain, loader())
    trainer(strategy("sgd")).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


class Declared(nn.Module):
    def __init__(self, stages=lambda m: [m.first, m.second]):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self._declared = nn.Linear(6, 6), nn.Linear(6, 6), stages

    def forward(self, x):
        return self.second(self.first(x))

    def pipeline_stages(self):
        return self._declared(self)


def test_pipeline_stages():
    plain, ours = Regression(Declared()), Regression(Declared())
    trainer().fit(plain, loader())
    trainer(strategy("sgd")).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (lambda m: [m.second, m.first], "pipeline_stages\\(\\) does not compute what Declared.forward does"),
        (lambda m: [m.first], "leaves out second.weight"),
        (lambda m: [m.first, torch.relu, m.second], "gave a .*builtin.* as stage 1; return modules"),
    ],
)
def test_pipeline_stages_that_are_not(stages, message):
    refused(Regression(Declared(stages)), message)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, x, y: mse_loss(m.model(x), y) + mse_loss(m.model(x), y), "called self.model twice.*call it once"),
        (lambda m, x, y: m.model(x) and None if x is None else (m.model(x), None)[1], "returned no loss"),
        (lambda m, x, y: None, "did not call self.model"),
        (lambda m, x, y: sum(p.sum() for p in m.parameters()), "did not call self.model"),
        (lambda m, x, y: {"other": m.model(x)}, "returned no loss"),
        (lambda m, x, y: (m.model(x), 3.0)[1], "returned a float"),
        (lambda m, x, y: m.model(x, x).sum(), "with 2 positional and 0 named arguments"),
        (lambda m, x, y: m.model(input=x).sum(), "with 0 positional and 1 named arguments"),
        (lambda m, x, y: m.model(x.clone().requires_grad_()).sum(), "the input of self.model requires a gradient"),
        (lambda m, x, y: (m.model(x), torch.ones((), requires_grad=True) * 1)[1], "does not depend on the output"),
        (lambda m, x, y: m.model(x).sum() + next(m.parameters()).norm(), r"depends on self.model.0.\S*weight beside"),
    ],
)
@pytest.mark.parametrize("size", [None, 1])
def test_training_steps(step, message, size):
    class Odd(Regression):
        def training_step(self, batch, batch_idx):
            return step(self, *batch)

    refused(Odd(), message, strategy("pb", micro_batch_size=size))


def test_a_second_call_without_gradient_is_fine():
    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.log("before", mse_loss(self.model(batch[0]), batch[1]))
            return super().training_step(batch, batch_idx)

    plain, ours = Looking(), Looking()
    trainer().fit(plain, loader())
    trainer(strategy("sgd")).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


def test_weights_outside_the_model():
    class Outside(Regression):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    message = "scale is trained by the optimizer, but lies outside 'model'.*leave it out.*module=\"self\""
    refused(Outside(), message, strategy("pb", module="model"))
    plain, ours = Outside(), Outside()
    trainer().fit(plain, loader())
    trainer(strategy("sgd", module="self")).fit(ours, loader())
    assert torch.equal(weights(plain), weights(ours))


def test_weights_that_the_optimizer_forgets():
    class Forgets(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.model[:3].parameters(), lr=0.1)

    refused(Forgets(), "model.3.0.weight requires a gradient, but is in no group")


@pytest.mark.parametrize("method", ["pb", "cerebras", "pipedream", "sgd"])
def test_accumulation_without_an_interval(method):
    """Each of the methods that the message types trains so."""
    message = "accumulate_grad_batches=6: .* after every micro-batch; use 1, or a method with an update interval: "
    with pytest.raises(ValueError, match=message) as found:
        trainer(strategy(method), accumulate_grad_batches=6).fit(Regression(), loader())
    names, built = re.split(message, str(found.value))[1].split(", or method=")
    cures = [*re.findall(r"'\w+'", names), built]
    assert len(cures) == 4
    for cure in cures:
        trainer(strategy(eval(cure)), accumulate_grad_batches=6).fit(Regression(), loader())


def test_accumulation_against_the_methods_number():
    refused(Regression(), "asks for an update every 8 micro-batches, but the method was built with micro_batches=6",
            strategy(methods.create("pipedream_2bw", micro_batches=6)), accumulate_grad_batches=8)  # fmt: skip


def test_an_interval_that_changes_on_the_way():
    module = Regression()
    with pytest.raises(ValueError, match="accumulate_grad_batches changed from 6 to 3 during fit"):
        trainer(strategy("pipedream_2bw"), callbacks=[GradientAccumulationScheduler({0: 6, 1: 3})]).fit(
            module, loader()
        )
    trainer(strategy("gpipe"), callbacks=[GradientAccumulationScheduler({0: 6, 1: 3})]).fit(Regression(), loader())


def test_too_few_micro_batches_for_two_versions():
    refused(Regression(), "pipedream_2bw: micro_batches=2 is too few for 5 stages", strategy("pipedream_2bw"),
            accumulate_grad_batches=2)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cerebas"}, "unknown method 'cerebas'; did you mean 'cerebras'\\?"),
        ({"method": 3}, "method must be a name, a pipeback.Method or None, but is int"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1 or None, but is 0"),
        ({"drain": "always"}, "drain must be one of end, validation, but is 'always'"),
        ({"micro_batchsize": 4}, "has no option 'micro_batchsize'; did you mean 'micro_batch_size'\\?"),
        (
            {"workers": "4"},
            r"workers must be a number of threads, a pipeback.Processes or None, but is '4'; .*workers=2",
        ),
        ({"replicas": 4}, r"has no option 'replicas'; a Trainer has one pipeline; use Trainer\(devices=...\)"),
        ({"xyz": 4}, "has no option 'xyz'; it takes method, micro_batch_size, reference_batch, stages, module, drain"),
        ({"leaves": ["a"]}, r"has no option 'leaves'; give stages=pipeback.Splitting\(leaves=\['a'\]\)"),
        ({"clip_norm": 1.0}, r"has no option 'clip_norm'; use Trainer\(gradient_clip_val=...\)"),
    ],
)
def test_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PipelineStrategy(**options)


@pytest.mark.parametrize(
    ("stages", "message"), [(0, "stages must be"), ("all", "stages must be"), (9, "the model has 5 modules to share")]
)
def test_stages(stages, message):
    refused(Regression(), message, strategy("pb", stages=stages))


def test_joined_stages():
    where = strategy("pb", stages=2)
    trainer(where).fit(Regression(), loader())
    assert where.pipeline.delays == [2, 0]


def test_the_method_refuses_the_optimizer():
    refused(Regression(optimizer="adam"), "stage 0 .*cerebras is written for momentum SGD, but the optimizer is Adam",
            strategy("cerebras"))  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 6), torch.zeros(3, 6)), "tensors of lengths \\[3, 4\\]"),
        ((torch.zeros(()), 1), "no tensors"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    data = torch.utils.data.DataLoader([batch], batch_size=None)
    refused(Regression(), "micro_batch_size=2: the batch has " + message, strategy("pb", micro_batch_size=2), data=data)


def test_a_monitor_without_a_pipeline():
    with pytest.raises(
        TypeError, match="PipelineMonitor watches the pipeback strategy, but this Trainer has SingleDev"
    ):
        trainer(callbacks=[PipelineMonitor()]).fit(Regression(), loader())
    with pytest.raises(ValueError, match="every_n_steps must be"):
        PipelineMonitor(0)


def test_no_pipeline_yet():
    with pytest.raises(RuntimeError, match="it is built when fit begins"):
        _ = strategy().pipeline


def test_a_failing_stage_names_itself_and_the_checkpoint_says_what_is_lost(tmp_path):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(6, 6), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 12:
                raise ArithmeticError("out of numbers")
            return self.linear(x)

    run = trainer(strategy("pb"))
    with pytest.raises(
        pipeback.StageError, match=r"stage 1 \(1\), micro-batch \d+: the forward failed: out of numbers"
    ):
        run.fit(Regression(nn.Sequential(nn.Linear(6, 6), Fails())), loader())
    with pytest.warns(UserWarning, match="a stage has failed, so what was in flight is lost"):
        run.save_checkpoint(tmp_path / "after.ckpt")
    assert "pipeback" not in torch.load(tmp_path / "after.ckpt", weights_only=True)


ORDERS = ["import pytorch_lightning as pl, pipeback.lightning", "import pipeback.lightning, pytorch_lightning as pl"]

REFUSED = """
for given in ("pipeback", pipeback.lightning.PipelineStrategy()):
    try:
        pl.Trainer(strategy=given, accelerator="cpu", logger=False, enable_checkpointing=False)
    except (TypeError, ValueError) as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize(("new", "order"), [(False, ORDERS[1]), rare(True, ORDERS[0]), rare(True, ORDERS[1])])
def test_the_other_lightning(new, order):
    """new: in an interpreter that has imported nothing yet; the others have imported pipeback.lightning."""
    pytest.importorskip("pytorch_lightning")
    code = f"{order}{REFUSED}"
    if new:
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
    name, instance = (found.stdout if new else in_a_new_process(printed, code)).splitlines()
    assert "write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`" in name
    assert "which is for lightning.pytorch, not for pytorch_lightning" in instance


def test_dropout_draws_from_the_stages_own_streams():
    """Two runs from one seed agree, whatever else draws from the global generator in between."""
    found = []
    for extra in (0, 3):
        torch.manual_seed(5)
        module = Regression(dropout_network())
        torch.manual_seed(5)
        run = trainer(strategy("pb"), callbacks=[Draw(extra)])
        run.fit(module, loader())
        found.append(weights(module))
    assert torch.equal(*found)


class Draw(pl.Callback):
    def __init__(self, count):
        self.count = count

    def on_train_batch_start(self, *rest):
        torch.rand(self.count + 1)
