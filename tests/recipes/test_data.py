"""The data of the recipes: splits do not leak, orders are reproducible, and missing files are explained."""

import gzip
import struct
import zipfile

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("sklearn")
pytest.importorskip("torchvision")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchvision.transforms.functional import to_pil_image

from pipeback.lightning import PipelineStrategy
from pipeback.recipes.data import DATA
from pipeback.recipes.data.pairs import plain, tokens
from pipeback.recipes.data.translation import END, IGNORED, PADDING, SEPARATOR

BUILTIN = {
    "digits": {},
    "mnist": {"builtin": True},
    "fashion_mnist": {"builtin": True, "augment": True},
    "cifar10": {"builtin": True, "augment": True},
    "shakespeare": {"builtin": True, "context": 32, "samples": 200, "val_samples": 50},
    "translation": {"builtin": True, "held_out": 0.1},
}


def build(name, **options):
    data = DATA[name](**{**BUILTIN[name], **options})
    data.setup()
    return data


def epochs(loader, count=1):
    return [(x, y) for _ in range(count) for x, y in loader]


@pytest.mark.parametrize("name", DATA)
def test_batches(name):
    data = build(name, batch_size=24)
    batches = epochs(data.train_dataloader())
    assert sum(len(x) for x, _ in batches) == data.epoch_samples == len(data.training)
    assert {len(x) for x, _ in batches[:-1]} == {24}
    assert len(data.train_dataloader()) == len(batches)
    x, y = data.training[3]  # one sample, for tools that ask so
    assert x.shape == batches[0][0].shape[1:] and y.shape == batches[0][1].shape[1:]
    assert sum(len(x) for x, _ in data.val_dataloader()) == len(data.validation)


@pytest.mark.parametrize("name", DATA)
def test_order_is_reproducible(name):
    """Seeds give orders; validation has one. What is drawn elsewhere in between does not matter."""
    one = epochs(build(name, seed=3).train_dataloader(), 2)
    state = torch.random.get_rng_state()
    again = epochs(build(name, seed=3).train_dataloader(), 2)
    assert torch.equal(state, torch.random.get_rng_state()), "loading draws from the stream of the model"
    other = epochs(build(name, seed=4).train_dataloader(), 2)
    assert all(torch.equal(a, b) for p, q in zip(one, again, strict=True) for a, b in zip(p, q, strict=True))
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[0][0], one[len(one) // 2][0]), "two epochs in the same order"
    first, second = (epochs(build(name, seed=s).val_dataloader()) for s in (3, 4))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_order_is_randperm():
    data = build("digits", seed=5)
    stream = torch.Generator().manual_seed(5)
    loader = data.train_dataloader()
    for _ in range(2):
        rows = torch.randperm(len(data.training), generator=stream)
        assert torch.equal(torch.cat([y for _, y in loader]), data.training.y[rows])


@pytest.mark.parametrize("name", ["digits", "fashion_mnist", "translation"])
def test_resumes_in_mid_epoch(name):
    pytest.importorskip("torchdata")
    loader = build(name, seed=1).train_dataloader()
    epochs(loader)
    running = iter(loader)
    for _ in range(3):
        next(running)
    state = loader.state_dict()
    expected = [*running, *loader]
    loader = build(name, seed=1).train_dataloader()
    loader.load_state_dict(state)
    found = [*loader, *loader]
    assert len(found) == len(expected)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("every", [3, 4, None])
def test_lightning_resumes_with_the_right_samples(every, tmp_path):
    """From the middle of an epoch of 4 batches, from its last batch, and from its end (the strategy sees to these)."""
    pytest.importorskip("torchdata")
    seen = []

    class Look(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(64, 1))

        def training_step(self, batch, index):
            seen.append(batch[0])
            return self.model(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(file=None):
        seen.clear()
        saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=every, filename="{step}")
        loop = Trainer(
            accelerator="cpu", strategy=PipelineStrategy("sgd"), max_epochs=3, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saving] if file is None else [], enable_checkpointing=file is None,
        )  # fmt: skip
        loop.fit(Look(), build("digits", samples=100, batch_size=25), ckpt_path=file)
        return list(seen)

    whole = fit()
    assert len(whole) == 12
    for file in sorted(tmp_path.glob("*.ckpt")):
        rest = fit(file)
        assert len(rest) == 12 - int(file.stem.partition("=")[2])
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[12 - len(rest) :], strict=True))


# -- digits and images -----------------------------------------------------------------------------------------------


def test_digits_are_those_of_before():
    """The split and the scaling by which the README's tables were made."""
    data = build("digits")
    assert data.facts == {"inputs": 64, "classes": 10}
    assert (len(data.training), len(data.validation)) == (1438, 359)
    assert data.training.y[:8].tolist() == [7, 7, 1, 9, 8, 5, 0, 4]
    assert data.training.x.mean().abs() < 1e-6 and data.training.x.std() == pytest.approx(1)
    assert build("digits", scaling="unit").training.x.max() == 1
    assert build("digits", scaling="symmetric").training.x.min() == -1


def test_images_are_standardised_by_the_training_images():
    data = build("fashion_mnist", augment=False)
    x = torch.cat([x for x, _ in epochs(data.train_dataloader())])
    assert data.facts == {"channels": 1, "size": 28, "classes": 10}
    assert x.shape[1:] == (1, 28, 28) and x.dtype == torch.float32
    assert x.mean().abs() < 1e-4 and x.std() == pytest.approx(1, abs=1e-3)
    assert build("fashion_mnist", flat=True).facts == {"inputs": 784, "classes": 10}


def test_augmentation_moves_whole_images():
    plain, varied = (build("cifar10", augment=flag) for flag in (False, True))
    (x, y), (z, w) = plain.training.__getitems__(range(64)), varied.training.__getitems__(range(64))
    assert torch.equal(y, w) and not torch.equal(x, z)
    assert torch.equal(plain.validation[0][0], varied.validation[0][0])
    for before, after in zip(x, z, strict=True):
        middle = after[:, 8:24, 8:24]  # lies somewhere in the image, mirrored or not, and is otherwise as it was
        places = (
            c[:, i : i + 16, j : j + 16] for c in (before, before.flip(2)) for i in range(4, 13) for j in range(4, 13)
        )
        assert any(torch.equal(middle, place) for place in places)


def idx(folder, kind, count, packed):
    """A few images in MNIST's format: the files, or these packed."""
    folder = folder / kind / "raw"
    folder.mkdir(parents=True)
    for part, n in (("train", count), ("t10k", count // 4)):
        images = struct.pack(">IIII", 2051, n, 28, 28) + bytes((7 * i + i // 784) % 256 for i in range(784 * n))
        labels = struct.pack(">II", 2049, n) + bytes(i % 10 for i in range(n))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_files_of_mnist_packed_or_not(name, kind, tmp_path):
    found = []
    for packed in (False, True):
        root = tmp_path / str(packed)
        idx(root, kind, 40, packed)
        data = DATA[name](root=str(root), samples=32, val_samples=8)
        data.setup()
        assert (len(data.training), len(data.validation)) == (32, 8)
        assert data.training.y[:12].tolist() == [*range(10), 0, 1]
        found.append(data.training.x)
        assert len(list((root / kind / "raw").iterdir())) == 4  # nothing was written
    assert torch.equal(*found)


def test_cifar10_from_folders(tmp_path):
    for part, each in (("train", 6), ("test", 2)):
        for label in range(10):
            folder = tmp_path / part / f"class{label}"
            folder.mkdir(parents=True)
            for n in range(each):
                to_pil_image(torch.full((3, 32, 32), 25 * label, dtype=torch.uint8)).save(folder / f"{n}.jpg")
    data = DATA["cifar10"](root=str(tmp_path))
    data.setup()
    assert (len(data.training), len(data.validation)) == (60, 20)
    assert torch.equal(data.training.x[:, 0, 0, 0].long(), 25 * data.training.y)
    assert len(set(data.training.y[:12].tolist())) > 3, "classes in a row: the first so many would be one class"


# -- sequences -------------------------------------------------------------------------------------------------------


def test_windows_cover_the_text_once(tmp_path):
    file = tmp_path / "tinyshakespeare.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(1000)))
    data = DATA["shakespeare"](root=str(tmp_path), context=16)
    data.setup()
    x, y = data.training.x, data.training.y
    assert data.facts == {"vocabulary": 26, "context": 16}
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])  # each character a target once, in order
    assert len(x) == 899 // 16 and len(data.validation) == 99 // 16
    text = "".join(data.characters[i] for i in data.validation.x.flatten().tolist())
    assert text == file.read_text()[900:][: len(text)]


def test_translation_does_not_leak(tmp_path):
    """What is said on one side is not on the other, in either language, however it is written; always the same side."""
    rows = [f"Sentence number {i}{end}\tSatz {i}, {v}." for i in range(400) for end in (".", "!") for v in "ab"]
    rows += [f"sentence NUMBER {i}\tNoch einer {i}." for i in range(400)]
    shared = [f"Said {i}\tGesagt {i // 4}!" for i in range(400)]  # four first sentences with one second
    file = tmp_path / "deu.txt"
    file.write_text("\n".join(f"{row}\tsomebody" for row in rows + shared))
    data = DATA["translation"](root=str(tmp_path), held_out=0.1)
    training, validation = data.split()
    for side in (0, 1):
        said = [{plain(tokens(pair[side])) for pair in part} for part in (training, validation)]
        assert said[0] and said[1] and not said[0] & said[1]
    ours = [pair for pair in training + validation if not pair.source.startswith("Said")]
    assert len(ours) == len(rows), "nothing else is left out"
    assert 0.06 < len(validation) / (len(rows) + len(shared)) < 0.14
    fewer = DATA["translation"](root=str(tmp_path), held_out=0.1, pairs=50)
    assert fewer.split() == (training[:50], validation)
    turned, _ = DATA["translation"](root=str(tmp_path), held_out=0.1, reverse=True).split()
    assert [(pair.target, pair.source) for pair in turned] == training
    with zipfile.ZipFile(tmp_path / "pairs.zip", "w") as archive:
        archive.writestr("_about.txt", "no pairs")
        archive.writestr("deu.txt", file.read_text())
    assert DATA["translation"](file=str(tmp_path / "pairs.zip"), held_out=0.1).split() == (training, validation)


def test_translation_asks_for_the_target_only():
    data = build("translation", max_length=7)
    x, y = data.validation.x[0].tolist(), data.validation.y[0].tolist()
    pair, border = data.pairs_held_out[0], data.validation.x[0].tolist().index(SEPARATOR)
    assert data.text(x) == " ".join([*tokens(pair.source), "|", *tokens(pair.target)])
    assert y[:border] == [IGNORED] * border
    answer = y[border : y.index(END) + 1]
    assert data.text(answer) == " ".join(tokens(pair.target))
    assert x[border + 1 :][: len(answer)] == answer
    assert set(y[border + len(answer) :]) <= {IGNORED} and set(x[border + len(answer) + 1 :]) <= {PADDING}
    assert max(answer) < data.facts["outputs"] <= data.facts["vocabulary"]
    assert max(len(tokens(s)) for pair in data.pairs_held_out for s in pair) <= 7


def test_vocabulary_comes_from_the_training_pairs(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"english{i} word\tdeutsch{i} Wort\n" for i in range(300)))
    data = DATA["translation"](file=str(file), held_out=0.2, vocabulary=10_000)
    data.setup()
    for side in (0, 1):
        held_out = {word for pair in data.pairs_held_out for word in tokens(pair[side])}
        assert held_out & set(data.words) == {("word", "wort")[side]}
    few = DATA["translation"](file=str(file), held_out=0.2, vocabulary=5)
    few.setup()
    assert few.facts == {"vocabulary": 14, "outputs": 9, "context": 17}


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        ("digits", {"root": "nowhere"}, ["data.root=nowhere", "digits.csv.gz"]),
        ("digits", {"samples": 0}, ["no training samples are left by data.samples"]),
        ("digits", {"scaling": "loud"}, ["data.scaling", "'loud'"]),
        ("mnist", {"root": "nowhere"}, ["data.root=nowhere", "MNIST/raw", "data.download=true"]),
        ("fashion_mnist", {"root": "nowhere"}, ["data.root=nowhere", "FashionMNIST/raw", "data.download=true"]),
        ("cifar10", {"root": "nowhere"}, ["data.root=nowhere", "cifar-10-batches-py", "train/", "data.download=true"]),
        ("shakespeare", {"root": "nowhere"}, ["data.root=nowhere", "tinyshakespeare.txt", "char-rnn", "data.file="]),
        ("shakespeare", {"file": "no.txt"}, ["data.file=no.txt"]),
        ("translation", {"root": "nowhere"}, ["data.root=nowhere", "deu.txt", "Tatoeba", "data.file="]),
        ("translation", {"builtin": True, "held_out": 1.0}, ["data.held_out", "1.0"]),
        ("translation", {"builtin": True, "max_length": 1}, ["no training samples", "data.max_length"]),
        ("shakespeare", {"builtin": True, "context": 10**6}, ["data.context=1000000"]),
    ],
)  # fmt: skip
def test_bad_input_reads_well(name, options, messages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        DATA[name](**options).setup()
    assert all(message in str(error.value) for message in messages), str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_a_tab_is_named(tmp_path):
    (tmp_path / "pairs.tsv").write_text("one\teins\ntwo zwei\n")
    with pytest.raises(ValueError, match="line 2 of .*pairs.tsv"):
        DATA["translation"](file=str(tmp_path / "pairs.tsv")).setup()
