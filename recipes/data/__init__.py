"""The data of the experiments: `DATA` maps the name in a conf/data entry to its `LightningDataModule`."""

from pipeback.recipes.data.digits import Digits
from pipeback.recipes.data.images import CIFAR10, MNIST, FashionMNIST
from pipeback.recipes.data.loading import Data
from pipeback.recipes.data.shakespeare import Shakespeare
from pipeback.recipes.data.translation import Translation

DATA: dict[str, type[Data]] = {
    "digits": Digits,
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "shakespeare": Shakespeare,
    "translation": Translation,
}
