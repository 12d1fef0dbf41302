"""What models of other packages do in their forwards, in small modules of our own: as plain torch, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipeback


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Model(nn.Module):
    """Blocks between which `between` is done, and a head."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 5)

    def between(self, x, *more):
        return x

    def forward(self, x, *more):
        for block in self.blocks:
            x = block(self.between(x, *more))
        return self.head(x)


class WrittenInto(Model):
    """Texts and pictures of several lengths go into one tensor of zeros, as Lumina's do."""

    def forward(self, x):
        x, packed = self.blocks[0](x), x.new_zeros(x.shape[0], 5, 8)
        packed[:, :3] = x[:, :3]
        for block in self.blocks[1:]:
            packed = block(packed)
        return self.head(packed).mean(1)


class SlicedToTensor(Model):
    """A slice that ends at a tensor of the input, not at a number."""

    def forward(self, x, lengths):
        x = x[:, : lengths.max()]
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


class Teacher(Model):
    """A teacher that follows the student, first thing in every forward."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        for p in self.teacher.parameters():
            p.mul_(0.5)

    def follow(self):
        for p, q in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, x):
        with torch.no_grad():
            self.follow()
            wanted = x
            for block in self.teacher:
                wanted = block(wanted)
        return super().forward(x) + self.head(wanted)


class TeacherAnew(Teacher):
    """The same with other data for the teacher's weights, as MoCo does."""

    def follow(self):
        for p, q in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            p.data = p.data * 0.9 + q.data * 0.1


class GradientHooks(Model):
    """Gradients scaled by hooks, one of which holds a number."""

    def between(self, x, scale=0.5):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
            x.register_hook(lambda gradient: gradient * scale)
        return x


class ByTask(Model):
    """What is pushed beside the tensors says what is computed."""

    def forward(self, x, task, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale) if task == "one" else self.head(x.relu() * scale) ** 2


class Counts(Model):
    """What stages would not do again: a number in an attribute decides."""

    def __init__(self):
        super().__init__()
        self.step, self.memory = 0, None

    def forward(self, x):
        self.step += 1
        x = x * min(self.step / 4, 1.0)
        if self.memory is not None:
            x = x + self.memory
        self.memory = x.detach()
        return super().forward(x)


class Decides(Model):
    """Layers are left out by values of layers."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 2
        return self.head(x)


class Router(nn.Module):
    """Gives a list of numbers with its tensors, as JetMoe's does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        scores = self.linear(x)
        return scores, scores.argmax(-1).bincount(minlength=2).tolist()


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.block = Router(), Block()

    def forward(self, x):
        scores, sizes = self.router(x)
        return self.block(x) * scores.softmax(-1)[:, :1] * max(sizes)


class Experts(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))


class SharedAttention(Model):
    """Cross-attention of one module for all blocks, whose query is expanded."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.randn(3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=4)

    def forward(self, x):
        pairs = x.unflatten(1, (2, 4))
        latent = self.latent.expand(len(x), -1, -1)
        for block in self.blocks:
            latent = block(latent + self.attention(latent, pairs, pairs, need_weights=False)[0])
        return self.head(latent.mean(1))


class Siamese(Model):
    """Two views go through one network, whose statistics are taken of both."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def between(self, x, *more):
        return self.norm(x)

    def forward(self, x):
        return super().forward(x) * super().forward(x.flip(1))


class Discriminated(Model):
    """What is real and what is made go through one discriminator."""

    def __init__(self):
        super().__init__()
        self.discriminator = Siamese()

    def forward(self, x):
        made = self.blocks[1](self.blocks[0](x))
        return self.discriminator(x) - self.discriminator(made)


class Heads(Model):
    """A layer of its own for each task, and one that comes before the others for some micro-batches."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 5), "two": nn.Linear(8, 5)})

    def forward(self, x, task, scale=1.0):
        x = self.first(x) if task == "one" else x
        for block in self.blocks:
            x = block(x)
        return self.heads[task](x)


class NamedAsOurs(Model):
    """Modules, weights and buffers of the names that stages had attributes of."""

    def __init__(self):
        super().__init__()
        self.code, self.label, self.learn = nn.Linear(8, 8), nn.BatchNorm1d(8), Block()
        self.names = nn.ModuleDict({"structured": Block(), "kind": Block(), "label": Block()})
        self.rewritten = nn.Parameter(torch.zeros(8))
        self.register_buffer("_scripts", torch.ones(8))

    def forward(self, x):
        x = self.learn(self.label(self.code(x))) + self.rewritten * self._scripts
        for block in self.names.values():
            x = block(x)
        return super().forward(x) + self.learn(x)[:, :5]


def tasks(generator):
    task, scale = torch.randint(2, (2,), generator=generator).tolist()
    return {"x": rows(generator), "task": ["one", "two"][task], "scale": 0.5 + scale}


def rows(generator, count=4):
    return torch.randn(count, 8, generator=generator)


def texts(generator):
    return torch.randn(4, 5, 8, generator=generator)


# a model, and what a push brings
CASES = {
    "by_task": (ByTask, tasks),
    "named_as_ours": (NamedAsOurs, rows),
    "teacher": (Teacher, rows),
    "teacher_anew": (TeacherAnew, rows),
    "gradient_hooks": (GradientHooks, rows),
    "written_into": (WrittenInto, texts),
    "sliced_to_tensor": (SlicedToTensor, lambda g: (texts(g), torch.randint(2, 6, (4,), generator=g))),
}


def batches(brings, count=5):
    generator = torch.Generator().manual_seed(0)
    return [(brings(generator), torch.randint(5, (4,), generator=generator)) for _ in range(count)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def called(model, x):
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def plain(model, data):
    optimizer = sgd(model.parameters())
    for x, y in data:
        cross_entropy(called(model, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def piped(model, data, method="sgd", **options):
    options = {"stages": "block", **options}
    pipe = pipeback.Pipeline(
        model, loss=cross_entropy, optimizer=sgd, method=method, example=data[0][0], **options
    )  # fmt: skip
    for x, y in data:
        pipe.push(x, y)
    pipe.drain()
    return pipe


# models that are refused, when they are built or at a push, the cut, and the option that the message types
CURED = {
    "counts": (Counts, "block", [""]),
    "decides": (Decides, "block", [""]),
    "experts": (Experts, "layer", ["blocks.0", "blocks.1", "blocks.2"]),
    "siamese": (Siamese, "block", [""]),
    "discriminated": (Discriminated, "block", ["discriminator"]),
    "heads": (Heads, "block", [""], tasks),
}


@pytest.mark.parametrize("name", CURED)
def test_the_cure_that_is_typed(name):
    kind, stages, leaves, *brings = CURED[name]
    torch.manual_seed(0)
    model, data = kind(), batches(*brings or [rows], 8)
    with pytest.raises((ValueError, pipeback.StageError)) as refused:
        piped(
            copy.deepcopy(model),
            data,
            stages=pipeback.Splitting(stages, leaves=[f"{n}.router" for n in leaves if stages == "layer"]),
        )
    assert f"leaves={leaves!r}" in str(refused.value)
    expected = plain(copy.deepcopy(model), data)
    pipe = piped(copy.deepcopy(model), data, stages=pipeback.Splitting(stages, leaves=leaves))
    assert (pipe.stages == 1) == (leaves == [""])
    for key, value in pipe.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    pipe.model.eval()
    x = data[0][0]
    if name != "counts":
        assert torch.equal(pipe.evaluate(x), called(pipe.model, x))


def test_evaluation_takes_the_kernels_that_the_model_does():
    model, x = SharedAttention(), rows(torch.Generator().manual_seed(0))
    pipe = pipeback.Pipeline(model, loss=cross_entropy, optimizer=sgd, method="sgd", example=x, stages="block")
    model.eval()
    with torch.no_grad():
        assert torch.equal(pipe.evaluate(x), pipe.model(x))


def test_the_whole_model_is_one_stage():
    x = batches(rows, 1)[0][0]
    with pytest.raises(
        ValueError,
        match=r"leaves=\[''\] keeps the whole model one stage, but stages=2; give stages=pipeback.Splitting\(1",
    ):
        pipeback.Pipeline(
            Model(), loss=cross_entropy, optimizer=sgd, example=x, stages=pipeback.Splitting(2, leaves=[""])
        )


@pytest.mark.parametrize("name", CASES)
def test_as_plain_torch(name):
    kind, brings = CASES[name]
    torch.manual_seed(0)
    model, data = kind(), batches(brings)
    expected = plain(copy.deepcopy(model), data)
    pipe = piped(copy.deepcopy(model), data)
    for key, value in pipe.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    pipe.evaluate(data[0][0])
    piped(model, data, "pb")
