"""Intercepted gradients: those of a backward of our own go to its sums, and all others go where they went."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from pipeback.stages.averaging import averaged
from pipeback.stages.gradients import Gradients, differentiate
from pipeback.stages.intercepted import Intercepts


class Branch(nn.Module):
    """One layer is used twice, one weight has no gradient at first, and one never has any."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.later = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.more = False

    def forward(self, x):
        y = self.second(self.first(x).tanh()) + self.first(x) * self.scale + self.frozen
        return y + self.later if self.more else y


def sums(threaded, model, xs, *, also=lambda n: None):
    gradients = Gradients(list(model.parameters()))
    gradients.share(threaded)
    for n, x in enumerate(xs):
        model.more = n > 1
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        also(n)
        differentiate([y], [x + 1], [leaf], [gradients])
        gradients.count_more(1)
    return gradients, leaf.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sums_are_those_of_autograd(dtype):
    torch.manual_seed(0)
    model, xs = Branch().to(dtype), torch.randn(6, 3, 4, dtype=dtype)
    plain, before = sums(False, model, xs)
    ours, after = sums(True, model, xs)
    assert ours.intercepts() is not None and torch.equal(before, after)
    for a, b in zip(plain.values, ours.values, strict=True):
        assert (a is None and b is None) or (torch.equal(a, b) and a.stride() == b.stride())
    assert sum(g is None for g in ours.values) == 1  # that of the frozen weight
    assert all(p.grad is None for p in model.parameters())


def test_backwards_of_others_are_left_alone():
    """In the same thread between ours, in another thread during ours, and those of another pipeline's sums."""
    torch.manual_seed(0)
    model, xs = Branch(), torch.randn(5, 3, 4)
    wanted, _ = sums(True, model, xs)
    earlier, _ = sums(True, model, xs)  # its hooks stay before the same nodes
    kept = [None if g is None else g.clone() for g in earlier.values]
    model.more = True
    [alone] = torch.autograd.grad(model(xs[0]).sum(), [model.second.weight])

    def users():
        model.zero_grad()
        model(xs[0]).sum().backward()

    class During(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            thread = threading.Thread(target=users)
            thread.start()
            thread.join()
            return g

    gradients = Gradients(list(model.parameters()))
    gradients.share(True)
    for n, x in enumerate(xs):
        model.more = n > 1
        y = During.apply(model(leaf := x.clone().requires_grad_()))
        users()
        assert torch.equal(model.second.weight.grad, alone) or n < 2
        differentiate([y], [x + 1], [leaf], [gradients])
        assert n < 2 or torch.equal(model.second.weight.grad, alone)
        gradients.count_more(1)
    for a, b, c, d in zip(wanted.values, gradients.values, earlier.values, kept, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
        assert (c is None and d is None) or torch.equal(c, d)


def test_weights_of_another_type_are_found_again():
    torch.manual_seed(0)
    model, xs = Branch(), torch.randn(3, 3, 4)
    gradients, _ = sums(True, model, xs)
    first = gradients.intercepts()
    gradients.take()
    gradients.count_anew()
    for p in model.parameters():
        p.data = p.data.double()
    for x in xs.double():
        y = model(leaf := x.clone().requires_grad_())
        differentiate([y], [x + 1], [leaf], [gradients])
        gradients.count_more(1)
    assert gradients.intercepts() not in (None, first)
    assert all(
        p.grad is None and (g is None or g.dtype == torch.float64)
        for p, g in zip(model.parameters(), gradients.values, strict=True)
    )
    plain = Gradients(list(model.parameters()))
    for x in xs.double():
        y = model(leaf := x.clone().requires_grad_())
        differentiate([y], [x + 1], [leaf], [plain])
    for a, b in zip(plain.values, gradients.values, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_sum_that_is_our_own_is_averaged_in_place():
    torch.manual_seed(0)
    model, xs = Branch(), torch.randn(5, 3, 4)
    plain, _ = sums(False, model, xs)
    ours, _ = sums(True, model, xs)
    first, second = plain.sums(), ours.sums()
    mine = [g.data_ptr() for g, own in zip(second.grads, second.owned, strict=True) if own and g is not None]
    a, b = averaged(first, None, None)[0], averaged(second, None, None)[0]
    assert mine and {g.data_ptr() for g in b if g is not None} >= set(mine)
    assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_they_go_with_their_sums():
    model = Branch()
    gradients, _ = sums(True, model, torch.randn(3, 3, 4))
    gone = weakref.ref(gradients), weakref.ref(gradients.intercepts())
    del gradients
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
    hooks = [o for o in gc.get_objects() if isinstance(o, Intercepts)]
    assert not any(h._nodes and h._nodes[0] is not None and h._nodes[0].variable is model.first.weight for h in hooks)
    model(torch.randn(3, 4)).sum().backward()
    assert model.first.weight.grad is not None
