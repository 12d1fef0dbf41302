"""Layer drop: a forward that decides by a random number which layers run is refused, and both cures work as typed."""

import operator
import re

import pytest
import torch
from torch import nn

import pipeback

TINY = dict(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
    conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, apply_spec_augment=False,
)  # fmt: skip
SPEECH = ("Wav2Vec2", "WavLM", "UniSpeech", "Hubert", "Data2VecAudio")
WAVES = [torch.randn(2, 400, generator=torch.Generator().manual_seed(n)) for n in range(6)]


def speech(name, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**TINY, **options))


def loss(output, target):
    return output["last_hidden_state"].pow(2).mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build(model, **options):
    torch.manual_seed(0)
    return pipeback.Pipeline(model, loss=loss, optimizer=sgd, method="sgd", example=WAVES[0], **options)


@pytest.mark.parametrize(("name", "layerdrop"), [*((name, 0.1) for name in SPEECH), ("WavLM", 0.5)])
def test_it_is_refused_and_both_cures_work(name, layerdrop):
    with pytest.raises(ValueError, match=r"'encoder'.forward draws a random number .*as layer drop does") as error:
        build(speech(name, layerdrop=layerdrop))
    off, whole = re.fullmatch(r".*; switch that off: (.*), or keep it whole: (.*)", str(error.value)).groups()
    model = speech(name, layerdrop=layerdrop)
    exec(off, {"model": model})
    assert len(build(model).optimizers) > 3
    pipe = build(speech(name, layerdrop=layerdrop), **eval(f"dict({whole})", {"pipeback": pipeback}))
    assert all(torch.isfinite(pipe.push(x, torch.zeros(2))) for x in WAVES)


@pytest.mark.parametrize("name", SPEECH)
def test_a_model_of_one_stage_drops_the_layers_of_the_plain_loop(name):
    """The stage's stream is that of the default generator, seeded alike."""
    plain, model = (speech(name, layerdrop=0.5).train() for _ in range(2))
    pipe = build(model, stages=pipeback.Splitting(leaves=[""]))
    found = [pipe.push(x, torch.zeros(2)).item() for x in WAVES]
    torch.manual_seed(0)
    optimizer, wanted = sgd(plain.parameters()), []
    for x in WAVES:
        optimizer.zero_grad()
        value = loss(plain(x), None)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    assert found == wanted and len(set(wanted)) > 3
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 0.5

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand([]) > self.p:
                x = layer(x)
        return x


def test_one_that_is_no_model_of_transformers():
    options = dict(loss=nn.functional.mse_loss, optimizer=sgd, method="sgd", example=torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"Drops 'drops'.forward draws .* be cut; keep it whole: stages=.*'drops'"):
        pipeback.Pipeline(Whole(), **options)
    pipe = pipeback.Pipeline(Whole(), stages=pipeback.Splitting(leaves=["drops"]), **options)
    assert len(pipe.optimizers) == 2 and torch.isfinite(pipe.push(torch.randn(4, 6), torch.randn(4, 6)))


class Compares(nn.Module):
    """Draws and compares with p; what is always so decides nothing."""

    def __init__(self, skips, p):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 6)
        self.skips, self.p = skips, p

    def forward(self, x):
        for layer in self.layers:
            if not self.skips(torch.rand([]), self.p):
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("skips", "p", "certain"), [
    ("lt", 0.0, True), ("lt", 1e-9, False), ("lt", 1.0, True), ("le", 0.0, False), ("le", -0.1, True),
    ("gt", 1.0, True), ("gt", 0.0, False), ("ge", 1.0, True), ("ge", 0.0, True), ("ge", 1 - 1e-9, False),
])  # fmt: skip
def test_a_drop_of_0_or_1_decides_nothing(skips, p, certain):
    def build(**options):
        return pipeback.Pipeline(
            model(), loss=nn.functional.mse_loss, optimizer=sgd, method="sgd", example=torch.randn(4, 6), **options
        )

    def model():
        torch.manual_seed(0)
        return Compares(getattr(operator, skips), p)

    if not certain:
        with pytest.raises(ValueError, match="draws a random number and decides by it"):
            build()
        return
    pipe, plain = build(), model()
    optimizer = sgd(plain.parameters())
    for x in torch.randn(5, 4, 6):
        optimizer.zero_grad()
        wanted = nn.functional.mse_loss(plain(x), x)
        wanted.backward()
        optimizer.step()
        assert torch.equal(pipe.push(x, x), wanted)
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.drops, self.head = Drops(), nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.drops(x))
