"""A plan on a device that is not here: the same bytes, and seconds by FLOP and data sheet."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.plan.training_plan import rows, title
from pipeback.planner import Device, Link

WIDTH, SAMPLES = 64, 8
SLOW = Device("slow", 1e12, 16e9, 1e11, Link(1e9), Link(1e9), Link(1e9), host_speed=1e10, disk_read=1e9, disk_write=5e8)


def built(**options):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    given = {"method": "gpipe", "micro_batch_size": SAMPLES, **options}
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-3)  # noqa: E731
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=adamw, **given)


X, Y = torch.randn(32, WIDTH), torch.randn(32, WIDTH)


@pytest.mark.parametrize("store", [None, "host", "disk"])
def test_bytes_are_those_of_this_machine(store, tmp_path):
    pipe = built(store=f"disk:{tmp_path}" if store == "disk" else store)
    here, there = pipe.plan(X, Y), pipe.plan(X, Y, device=SLOW)
    assert (here.device, here.host, here.disk, here.passes) == (there.device, there.host, there.disk, there.passes)
    assert title(there) == f"{title(here)}, assumed on slow"
    assert len(rows(here)) == len(rows(there))


def test_seconds_are_flop_and_bytes_over_speeds():
    """Of one stage: products at half of the peak, as the weights have 32 bits, and its bytes over the links."""
    pipe = built(store="host")
    load = pipe.plan(X, Y, device=SLOW).facts.stages[1].load
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert load.fetch == pytest.approx(weights / 1e9, rel=0.02)  # in lines of 64 bytes
    assert load.leave == pytest.approx(weights / 1e9)
    assert load.update == pytest.approx((2 * 3 + 1) * weights / 1e10, rel=0.02)
    assert load.backward == pytest.approx(2 * load.forward, rel=0.1)
    fast = pipe.plan(X, Y, device="H100").facts.stages[1].load
    assert fast.fetch == pytest.approx(weights / 50e9, rel=0.02)


def test_a_slower_link_waits_longer():
    pipe = built(store="host")
    big = torch.randn(32 * 64, WIDTH)
    shares = [pipe.plan(big, big, device=device).push.share for device in ("GH200", "H100", SLOW)]
    assert shares[0] <= shares[1] and shares[2] > 0


def test_room_is_that_of_the_device():
    assert built(store="host").plan(X, Y, device="A100-40").facts.device_room == 40 * 10**9


def test_mistakes():
    pipe = built()
    with pytest.raises(ValueError, match="there is no device 'H10'; did you mean 'H100'"):
        pipe.plan(X, Y, device="H10")
    pipe.push(X, Y)
    with pytest.raises(
        ValueError, match=r'plan: give it a push, whose FLOP are counted: pipe.plan\(x, y, device="H100"\)'
    ):
        pipe.plan(device="H100")
