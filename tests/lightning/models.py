"""Models as people write them, which know nothing of stages, in LightningModules that know nothing of pipelines."""

import importlib.util

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.laws.cases import OPTIMIZERS

VOCABULARY = 20


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, tokens):
        _, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1])


class UNet(nn.Module):
    """Every level of the way down is handed to the same level of the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3 if n == 0 else 4 * n, 4 * (n + 1), 3, padding=1) for n in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(4 * (n + 1) + 4 * (n + 2), 4 * (n + 1), 3, padding=1) for n in (1, 0)])
        self.out = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        levels = []
        for n, layer in enumerate(self.down):
            x = torch.relu(layer(x if n == 0 else nn.functional.max_pool2d(x, 2)))
            levels.append(x)
        for layer, level in zip(self.up, levels[-2::-1], strict=True):
            x = torch.relu(layer(torch.cat([nn.functional.interpolate(x, scale_factor=2), level], 1)))
        return self.out(x).mean((2, 3))


class Images(Dataset):
    """Images or token sequences, and classes."""

    def __init__(self, samples, tokens=False, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x = (
            torch.randint(1, VOCABULARY, (samples, 7), generator=generator)
            if tokens
            else torch.randn(samples, 3, 32, 32, generator=generator)
        )
        self.y = torch.randint(0, 4, (samples,), generator=generator)
        self.tokens = tokens

    def __len__(self):
        return len(self.y)

    def __getitem__(self, n):
        return self.x[n], self.y[n]


class Texts(Images):
    """What tokenizers give: dictionaries, of texts of different lengths, padded."""

    def __init__(self, samples, seed=1):
        super().__init__(samples, True, seed)

    def __getitem__(self, n):
        length = 7 - n % 3
        mask = (torch.arange(7) < length).long()
        return {"input_ids": self.x[n] * mask, "attention_mask": mask, "labels": self.x[n]}


class Case(pl.LightningModule):
    def __init__(self, model, optimizer="momentum"):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.optimizer, self.losses, self.values = model(), optimizer, [], []

    def loss(self, batch):
        x, y = batch
        return cross_entropy(self.model(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.values.append(loss.detach())
        self.log("val/loss", loss)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


class Translation(Case):
    """nn.Transformer with a causal mask and a padding mask, by position and by keyword."""

    def loss(self, batch):
        tokens, _ = batch
        table = torch.linspace(-1, 1, VOCABULARY * 8).view(VOCABULARY, 8).sin()
        x = table[tokens]
        causal = torch.full((7, 7), -torch.inf).triu(1)
        padding = (torch.arange(7)[None] >= 5) & (tokens[:, :1] % 2 == 0)
        found = self.model(x, x, None, causal, src_key_padding_mask=padding, tgt_is_causal=False)
        return mse_loss(found, x.flip(1))


class Inside(Case):
    """The model computes the loss itself."""

    def loss(self, batch):
        return self.model(**batch).loss


class Outside(Case):
    def loss(self, batch):
        found = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return cross_entropy(found.logits.flatten(0, 1), batch["labels"].flatten())


def resnet():
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=4, norm_layer=lambda channels: nn.GroupNorm(4, channels))


def transformer():
    return nn.Transformer(8, 2, 1, 2, 12, dropout=0.0, batch_first=True)


def gpt2(cache=False, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": cache, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, **options))


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


CASES = {  # the LightningModule, its model, its data
    "resnet": (Case, resnet, Images),
    "recurrent": (Case, Recurrent, lambda n: Images(n, tokens=True)),
    "unet": (Case, UNet, Images),
    "transformer": (Translation, transformer, lambda n: Images(n, tokens=True)),
}
if importlib.util.find_spec("transformers") is not None:
    CASES |= {
        "gpt2": (Inside, gpt2, Texts),
        "gpt2, loss outside": (Outside, gpt2, Texts),
        "llama": (Inside, llama, Texts),
        "t5": (Inside, t5, Texts),
    }


def case(name, optimizer="momentum"):
    kind, model, _ = CASES[name]
    return kind(model, optimizer)


def data(name, batches=6, samples=4, **options):
    return StatefulDataLoader(CASES[name][2](batches * samples), batch_size=samples, **options)
