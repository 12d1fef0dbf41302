"""What is in force, called or held while pushes are left out (`Debug(take_back=N)`). The law over all methods and
runtimes is tests/laws/test_take_back.py."""

import gc
import shutil
import signal
import threading
import weakref

import pytest
import torch
from torch import nn

import pipeback
from pipeback.runtime.lazy_loss import LazyLoss
from tests.helpers.choice import rare
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, everything
from tests.laws.test_set_between import SETS, Model
from tests.laws.test_take_back import bad, compared, made, same, trained
from tests.pipeline.test_dropped import ARMED, BAD, loss
from tests.processes.cases import drawing, half

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
COUNT, GONE = 24, (5, 11)
COMPILES = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler"
)


def both(meanwhile, at=0, backward=True, case="pb", **options):
    """meanwhile: (pipe, n) before the push that is the n-th good one of both."""
    good = [push for n, push in enumerate(data(COUNT, 8)) if n not in GONE]
    hurt, plain = (made(case, at, backward, **{"workers": 2, **options}) for _ in range(2))
    losses, told, wanted = [], [], []
    for n, push in enumerate(good):
        meanwhile(hurt, n)
        for some in (*((bad(at),) if n + sum(m < n for m in GONE) in GONE else ()), push):
            try:
                losses.append(hurt.push(*some))
            except pipeback.PushLeftOut as error:
                told += error.pushes
                losses.append(error.loss)
    for n, push in enumerate(good):
        meanwhile(plain, n)
        wanted.append(plain.push(*push))
    while True:
        try:
            hurt.wait()
            break
        except pipeback.PushLeftOut as error:
            told += error.pushes
    return hurt, plain, told


def alike(hurt, plain, told, count=2):
    assert len(told) == count
    assert (hurt.arrived, hurt.pushes) == (plain.arrived, plain.pushes)
    assert torch.equal(everything(hurt), everything(plain))
    hurt.drain(), plain.drain()
    assert torch.equal(everything(hurt), everything(plain))
    for one, other in zip(hurt.optimizers, plain.optimizers, strict=True):
        assert [g["lr"] for g in one.param_groups] == [g["lr"] for g in other.param_groups]
    hurt.close(), plain.close()


def patient(call):
    """Call it again if it has found a push that failed."""
    while True:
        try:
            return call()
        except pipeback.PushLeftOut:
            pass


@pytest.mark.parametrize("workers", [None, 2])
def test_rates_that_a_scheduler_sets(workers):
    def meanwhile(pipe, n):
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 * 0.9 ** (n // 2)

    hurt, plain, told = both(meanwhile, workers=workers)
    assert hurt.state_dict()["plain"]["groups"] == plain.state_dict()["plain"]["groups"]
    alike(hurt, plain, told)


def test_clipping():
    hurt, plain, _ = both(lambda pipe, n: patient(lambda: pipe.clip(norm=0.1 if n % 4 else 0.02)))
    alike(hurt, plain, GONE)


@pytest.mark.filterwarnings("error:an attribute of a module was set")
@pytest.mark.parametrize("case", ["pb", "cerebras"])
def test_modes_and_dropout(case):
    def meanwhile(pipe, n):
        told = []
        if n in (7, 13):
            module = pipe._engine.model[2][0]
            while True:
                try:
                    module.train(n == 13)
                    break
                except pipeback.PushLeftOut as error:
                    told += error.pushes
        if n in (9, 10):
            patient(pipe.wait)
            pipe._engine.model[3][0].inner[-1].p = 0.6 if n == 9 else 0.3

    hurt, plain, _ = both(meanwhile, case=case)
    alike(hurt, plain, GONE)


def test_evaluating_and_saving_in_between():
    def meanwhile(pipe, n):
        if n % 3 == 0:
            patient(lambda: pipe.evaluate(data(1, 4)[0][0]))
            patient(pipe.state_dict)

    hurt, plain, _ = both(meanwhile, every=4)
    alike(hurt, plain, GONE)


def test_weights_that_are_written_after_a_drain():
    def meanwhile(pipe, n):
        if n in (3, 16):
            patient(pipe.drain)
            with torch.no_grad():
                pipe._engine.model[1][0].inner[0].weight.mul_(0.5)
            pipe.optimizers[2].state.clear()

    hurt, plain, _ = both(meanwhile, every=50)
    alike(hurt, plain, GONE)


@pytest.mark.parametrize("workers", [None, 2])
def test_weights_that_are_written_with_something_in_flight(workers):
    """They are kept as they were written, whatever fails afterwards."""

    def meanwhile(pipe, n):
        if n == 3:
            patient(pipe.wait)
            with torch.no_grad():
                pipe._engine.model[1][0].inner[0].weight.mul_(0.5)
            pipe.optimizers[2].state.clear()

    hurt, plain, _ = both(meanwhile, every=50, workers=workers)
    alike(hurt, plain, GONE)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": None, "store": "host"},
        {"workers": 2, "store": "host"},
        {"activations": "recompute"},
        {"activations": "host"},
        {"micro_batch_size": pipeback.MicroBatches(3, weights="samples")},
        {"optimizer": "adamw"},
        {"clip_norm": 0.1},
        {"store": pipeback.Streaming("host", sparsity="set"), "case": "pipedream"},
    ],
    ids=str,
)
def test_options(options):
    alike(*both(lambda pipe, n: None, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"masters": True, "workers": 2}, {"masters": True, "replicas": 2},
        *(pytest.param({"compile": True, "workers": w}, marks=[COMPILES, pytest.mark.soak]) for w in (None, 2)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("pipedream")])
def test_masters_and_compiled_stages(case, options):
    def built(every):
        torch.manual_seed(7)
        model = half() if "masters" in options else drawing()
        return pipeback.Pipeline(
            model, loss=loss, optimizer=OPTIMIZERS["momentum"], method=CASES[case](STAGES),
            debug=pipeback.Debug(take_back=every), **options,
        )  # fmt: skip

    good = data(COUNT, 8)
    hurt, plain = built(3), built(None)
    losses, told = trained(hurt, [bad(None) if n in GONE else push for n, push in enumerate(good)])
    wanted, _ = trained(plain, [push for n, push in enumerate(good) if n not in GONE])
    assert len(told) == 2
    same(hurt, plain, losses, wanted, GONE)


@pytest.mark.parametrize("order", ["upstream", "sticky", "random", "skewed"])
def test_orders(order):
    def built():
        torch.manual_seed(7)
        return pipeback.Pipeline(
            made("pb", 0, True)._engine.model, loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb",
            debug=pipeback.Debug(take_back=3, order=order),
        )  # fmt: skip

    good = data(COUNT, 8)
    hurt, plain = built(), built()
    losses, told = trained(hurt, [bad(0) if n in GONE else push for n, push in enumerate(good)])
    wanted, _ = trained(plain, [push for n, push in enumerate(good) if n not in GONE])
    assert len(told) == 2
    same(hurt, plain, losses, wanted, GONE)


@pytest.mark.parametrize("options", [{"workers": 2}, {"replicas": 2}], ids=str)
def test_a_model_whose_forward_is_followed(options):
    """Its attributes are set between pushes, and branches and forms of batches come and go."""

    def built():
        model = Model()
        torch.manual_seed(7)
        return pipeback.Pipeline(
            model, loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", stages="layer", example=data(1, 8)[0][0],
            debug=pipeback.Debug(take_back=4), **options,
        )  # fmt: skip

    hurt, plain = built(), built()
    sets = list(SETS.values())
    told = []
    for n, (x, y) in enumerate(data(len(sets), 8)):
        for pipe in (hurt, plain):
            patient(pipe.wait)
            sets[n](pipe._engine.model.sub)
        for some in ((x, y), *(((x, torch.full_like(y, BAD)),) if n in GONE else ())):
            try:
                hurt.push(*some)
            except pipeback.PushLeftOut as error:
                told += error.pushes
        plain.push(x, y)
    patient(hurt.drain), plain.drain()
    assert hurt.pushes == plain.pushes == len(sets)
    assert torch.equal(everything(hurt), everything(plain))
    hurt.close(), plain.close()


def test_two_at_once_and_one_after_the_other():
    compared("pb", 0, True, gone=(4, 5, 6, 13), workers=2, every=4)
    compared("cerebras", None, False, gone=(0 + 1, 2, 3), workers=2, every=4)


def test_the_push_that_is_called_is_trained_and_its_loss_is_in_the_error():
    pipe, plain = made("pb", 1, False, workers=2), made("pb", 1, False, workers=2)
    good = data(4, 8)
    pipe.push(*good[0])
    lost = pipe.push(*bad(1))
    with pytest.raises(pipeback.StageError):
        pipe._engine.runtime.join()
    with pytest.raises(
        pipeback.PushLeftOut, match=r"stage 1 .*micro-batch 1: the forward failed: bad values; push 1 was"
    ) as e:
        pipe.push(*good[1])
    assert (e.value.pushes, e.value.operation, e.value.stage, e.value.micro_batch) == ((1,), "forward", 1, 1)
    wanted = [float(plain.push(*push)) for push in good[:2]]
    assert float(e.value.loss) == wanted[1] and pipe.pushes == 2
    with pytest.raises(pipeback.PushLeftOut, match="push 1 was left out"):
        float(lost)
    assert float(pipe.push(*good[2])) == float(plain.push(*good[2]))
    pipe.close(), plain.close()


def test_reading_a_loss_notices():
    pipe, plain = made("pb", 1, False, workers=2), made("pb", 1, False, workers=2)
    good = data(4, 8)
    pipe.push(*good[0])
    lost = pipe.push(*bad(1))
    with pytest.raises(pipeback.PushLeftOut, match="push 1 was left out"):
        float(lost)
    assert lost.known is None
    later = [pipe.push(*push) for push in good[1:]]
    assert [float(a) for a in later] == [float(plain.push(*push)) for push in good][1:]
    assert all(isinstance(value, LazyLoss) and value.known for value in later)
    pipe.close(), plain.close()


def test_a_loss_that_was_read_stays():
    pipe = made("pb", 0, True, workers=2, every=50)
    good = data(16, 8)
    losses = [pipe.push(*push) for push in good[:4]]
    pipe.push(*bad(0))
    read = pipe.push(*good[4])
    before = float(read)
    for push in good[5:]:
        patient(lambda push=push: losses.append(pipe.push(*push)) if pipe.pushes < 30 else None)
    patient(pipe.wait)
    assert float(read) == before
    pipe.close()


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        if ARMED and threading.current_thread() is not threading.main_thread():
            ARMED.pop()
            raise ValueError("no step")
        super().step(closure)


def test_an_update_that_fails():
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        return pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda p: Fails(p, lr=0.1), method="pipedream", workers=2,
            debug=pipeback.Debug(take_back=2),
        )  # fmt: skip

    hurt, plain = built(), built()
    left = []
    for n, (x, y) in enumerate(data(10, 4)):
        if n == 6:
            hurt.wait()
            ARMED.append(n)
        try:
            hurt.push(x, y)
            hurt.wait()
        except pipeback.PushLeftOut as error:
            assert error.operation == "update"
            left += error.pushes
    for n, (x, y) in enumerate(data(10, 4)):
        if n not in left:
            plain.push(x, y)
    assert len(left) == 1 and not ARMED
    assert torch.equal(everything(hurt), everything(plain))
    hurt.close(), plain.close()


@pytest.fixture
def heard():
    """Ctrl-C raises, as it does in a terminal; what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_event_loop_leaves_its_push_out(heard):
    """Also in a backward, after which stages have made different numbers of updates."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ARMED:
                ARMED.pop()
                raise KeyboardInterrupt
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Stops.apply(x)

    def built():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), Layer()) for _ in range(3)]
        return pipeback.Pipeline(
            nn.Sequential(*layers), loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb",
            debug=pipeback.Debug(take_back=4),
        )  # fmt: skip

    hurt, plain = built(), built()
    for n, (x, y) in enumerate(data(12, 4)):
        if n == 6:
            ARMED.append(n)
            with pytest.raises(KeyboardInterrupt, match="push 6 was left out, as if it had not come, and"):
                hurt.push(x + 1, y)
        assert torch.equal(hurt.push(x, y), plain.push(x, y))
    assert torch.equal(everything(hurt), everything(plain)) and hurt.pushes == 12
    assert list(hurt.ledger) == list(plain.ledger)


def test_ctrl_c_while_a_push_waits_for_room_in_threads(heard, monkeypatch):
    hurt, plain = made("pb", workers=2), made("pb", workers=2)
    for n, (x, y) in enumerate(data(12, 8)):
        if n == 7:
            real = type(hurt._engine.runtime).tell

            def tell(runtime, command, real=real):
                """One worker is told and the other is not."""
                runtime.commands[0].offer(command, 1)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(type(hurt._engine.runtime), "tell", lambda *given: patch.undo() or tell(*given))
                with pytest.raises(KeyboardInterrupt, match="push 7 was left out"):
                    hurt.push(x + 1, y)
        hurt.push(x, y), plain.push(x, y)
    assert torch.equal(everything(hurt), everything(plain)) and hurt.pushes == plain.pushes == 12
    hurt.close(), plain.close()


def test_recorded_operations_are_those_of_the_last_training():
    pipe = made("pb", 0, True, workers=2)
    pipe.push(*data(1, 8)[0])
    pipe.record()
    trained(pipe, [bad(0) if n == 3 else push for n, push in enumerate(data(20, 8))])
    slots = [(slot.stage, slot.op) for slot in pipe.recorded]
    assert len(slots) == len(set(slots)) > 0
    pipe.close()


def test_a_pipeline_that_nobody_holds_is_gone():
    gc.collect()
    before = threading.active_count()
    pipe = made("pb", workers=2)
    value = pipe.push(*data(1, 8)[0])
    there = weakref.ref(pipe._engine)
    del pipe
    gc.collect()
    assert there() is None and threading.active_count() == before
    assert isinstance(value, LazyLoss)


def test_without_the_option_nothing_is_kept():
    pipe = made("pb", workers=2, every=None)
    assert pipe._engine.kept is None
    pipe.close()
