"""Shakespeare: a text as windows of characters; a model predicts the next character at every position."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeback.recipes.data.files import find, given
from pipeback.recipes.data.loading import Data, Samples

ORIGIN = (
    "it is the file of 1,115,394 characters that char-rnn trains on, "
    "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt; any other text: data.file="
)


class Shakespeare(Data):
    """x (B, context) int64 characters, y (B, context) the characters that follow. The last 10 % of the text validate.

    root         the folder of tinyshakespeare.txt (null: as builtin);  file: any text instead
    context      characters per window
    samples      train on this many windows only, the first ones;  val_samples: the same for validation
    builtin      the topics of Python's own help instead, for a trial without files
    """

    def __init__(
        self,
        root: str | None = "data",
        file: str | None = None,
        context: int = 128,
        samples: int | None = None,
        val_samples: int | None = None,
        builtin: bool = False,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        self.root, self.file, self.context, self.builtin = root, file, context, builtin
        self.samples, self.val_samples = samples, val_samples
        self.characters: list[str] = []
        """The character of each number."""

    def load(self) -> tuple[Samples, Samples]:
        text = self.read()
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.facts = {"vocabulary": len(self.characters), "context": self.context}
        data = torch.tensor([number[character] for character in text])
        border = len(data) * 9 // 10
        return self.windows(data[:border], self.samples), self.windows(data[border:], self.val_samples)

    def windows(self, data: Tensor, most: int | None) -> Samples:
        """Return windows that do not overlap, so that every character is a target once."""
        count = (len(data) - 1) // self.context
        if count < 1:
            raise ValueError(f"data.context={self.context} is too long for a text of {len(data)} characters")
        end = count * self.context
        x, y = (data[first : first + end].view(count, self.context)[:most] for first in (0, 1))
        return Samples(x, y)

    def read(self) -> str:
        if self.builtin or (self.root is None and self.file is None):
            from pydoc_data.topics import topics

            return "\n".join(topics[name] for name in sorted(topics))
        file = given(self.file, ORIGIN) if self.file else find(self.root, ("tinyshakespeare.txt",), ORIGIN)
        return file.read_text(encoding="utf-8")
