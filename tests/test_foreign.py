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


def rows(generator, count=4):
    return torch.randn(count, 8, generator=generator)


def texts(generator):
    return torch.randn(4, 5, 8, generator=generator)


# a model, and what a push brings
CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_as_plain_torch(name):
    kind, brings = CASES[name]
    torch.manual_seed(0)
    model, data = kind(), batches(brings)
    expected = plain(copy.deepcopy(model), data)
    pipe = piped(copy.deepcopy(model), data)
    for key, value in pipe.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    piped(model, data, "pb")
