"""Pipelines that the event loop runs, and the same with stages that run as one."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeback.plan.forecast import fills
from tests.laws.cases import CASES, data, pipeline, weights

S = 7


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())


def model(dtype=torch.float64, make=block):
    """A first stage and a head of their own, and in between what is alike."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *[make() for _ in range(S - 2)], nn.Linear(6, 6, bias=False)).to(dtype)


def unlike():
    """Two stacks, stages of their own between them, and one that passes two tensors."""
    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0))
    return nn.Sequential(
        block(), nn.Linear(6, 6), block(), odd, block(), nn.Linear(6, 6), block(), nn.Linear(6, 6)
    ).double()  # fmt: skip


def doubles(count=50, **options):
    return data(count, dtype=torch.float64, **options)


def trained(case, optimizer=None, some=None, build=model, push=None, **options):
    pipe = pipeline(build(), CASES[case](S), optimizer, **options)
    losses = [(push or pipe.push)(x, y) for x, y in some or doubles()]
    flying = weights(pipe)
    pipe.drain()
    return pipe, torch.stack([loss.double() for loss in losses]), flying, weights(pipe)


def same(found, wanted, within=1e-10):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)


def turns(case):
    """2 where stages of even and of odd number take turns."""
    method = CASES[case](S)
    return 0 if method.fixed_groups else getattr(method.schedule, "turns", 0)


class Twice(nn.Module):
    """Two weights whose gradients are one and the same."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.one(x) + self.other(x))


# whose updates are the methods' own, called with rows
OWN = ("ef", "ef-horizon1", "pipeoptim", "msnag", "msnag-stash", "gap_aware", "dc_asgd", "dc_asgd-adaptive", "braking",
       "dc_asgd+pipeoptim", "gap_aware+msnag", "staleness_lr+ef")  # fmt: skip
TURNED = ("eigendelay", "eigendelay-stash", "eigendelay-one-side")  # the same, in bases of their own
# updates of several micro-batches, or forwards on older versions, which no compiled tick has
SEVERAL = ("pipemare-t3", "pipeoptim-xpipe", "pipedream-vertical")
LEAP = ("pb", "pb-v", "pb-slack1", "lwp", "lwp-horizon3", "sc", "sc-horizon2", "cerebras", "spectrain",
        "spectrain-slack2", "pipedream", "pipedream-slack2", "pipemare", "pipemare-t1", "pipemare-t2", "staleness_lr",
        "spectrain-v2", "lwp-weight", "lwp-weight+sc", *OWN, *SEVERAL)  # fmt: skip

# which consist of flushes, that are done as a whole
FLUSH = ("gpipe", "gpipe-4", "one_f_one_b", "one_f_one_b-3", "zb_h1", "zb_h1-4", "zb_h2", "zb_h2-7", "interleaved",
         "interleaved-4", "looped_bfs", "looped_bfs-3", "zb_v", "zb_v-4")  # fmt: skip
GROUPED = ("pipedream_2bw",)  # groups of which are


def pushed(pipe, sizes=(9, 1, 23, 2, 15), before=lambda n: None):
    """Losses and weights in flight, and drained; so many micro-batches of three samples a push."""
    xs, ys = map(torch.cat, zip(*doubles(sum(sizes)), strict=True))
    losses = []
    for n, (x, y) in enumerate(zip(*(v.split([3 * size for size in sizes]) for v in (xs, ys)), strict=True)):
        before(n)
        losses.append(pipe.push(x, y))
    flying = weights(pipe)
    pipe.drain()
    return [torch.stack([loss.double() for loss in losses]), flying, weights(pipe)]


def pipelines(case, optimizer=None, build=model, **options):
    """The event loop's, and one that runs stages as one."""
    for on in ({}, {"vectorize": True}):
        method = CASES[case](S) if isinstance(case, str) else case
        yield pipeline(build(), method, optimizer, **{"micro_batch_size": 3, **options, **on})


def decayed(params):
    """Groups in another order than the weights, of which one decays."""
    many, few = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": few, "lr": 0.003}, {"params": many, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, weight_decay=0.0)


class Doubled(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair):
        return self.linear(pair[0]), pair[1]


class Summed(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def through(pipe, some, sizes=(8, 3, 1, 8, 5, 2)):
    """Train on micro-batches, of which so many go forward together; return the losses, which are computed outside."""
    losses = []
    for size in sizes:
        xs, ys = zip(*(some.pop(0) for _ in range(size)), strict=True)

        def judge(n, output, ys=ys):
            loss = mse_loss(output.to(ys[n].dtype), ys[n])  # torch 2.11 does not differentiate it otherwise
            losses.append(loss.detach())
            loss.backward()
            return output.grad

        (output,) = pipe.forward_many(xs, expected=size, judge=judge)
        pipe.backward(judge(size - 1, output))
        pipe.step()
    return torch.stack(losses)


def share_equally(monkeypatch):
    """Let workers have equally many stages, however long each takes."""
    for place in ("distributed.held_stages", "pipeline.stacking"):
        monkeypatch.setattr(f"pipeback.{place}.balance", lambda seconds, workers: [s * workers // S for s in range(S)])


def planned_and_counted(pipe, count):
    """What the plan says of five pushes of so many micro-batches of three samples, and what five pushes have moved."""
    some = iter(doubles(400))

    def push():
        x, y = (torch.cat(part) for part in zip(*[next(some) for _ in range(count)], strict=True))
        return pipe.push(x, y)

    x, y = (torch.cat(part) for part in zip(*doubles(count), strict=True))
    plan = pipe.plan(x, y, pushes=5)
    for _ in range(fills(plan.facts, count)):
        push()
    pipe.wait()
    before = pipe.traffic()
    for _ in range(5):
        push()
    pipe.wait()
    return plan.push, pipe.traffic().since(before), pipe.traffic()
