"""Forwards that showed a fault once, each under what went wrong."""

from .forward import Forward
from .step import Step

FAULTS = {
    "what a second call of a layer wrote into its buffer was lost": Forward(
        layers=("averaging",), steps=((0, 0, False), (0, 0, False)), method="sgd"
    ),
    "the zeros with which a GRU begins were taken for a function of the weights": Forward(
        layers=("gru",), steps=((0, 0, False),), pushes=8, runtime={"vectorize": "auto"}
    ),
    "the weights of a layer were those of another stage for a moment": Forward(
        layers=("gru", "encoder"), steps=((0, 0, False), (1, 0, False), (0, 0, True)), pushes=30, runtime={"workers": 2}
    ),
    "a graph of the loss had no gradient of an input that is a whole number": Forward(
        layers=("named",), steps=((0, 0, False), ("placed", 0, False)), gathers=True, stages=2,
        runtime={"vectorize": "auto"},
    ),
    "a product with a tied weight was evaluated by another kernel": Forward(
        layers=("gru",), steps=(("tied", 0, False), (0, 0, False), ("tied", 0, False)), method="sgd"
    ),
}  # fmt: skip
STEPS = {
    "a store took away a weight that a later stage still had in another shape": Step(
        layers=("perceptron",), steps=(("convolved", 2, True),), gathers=True, method="gpipe", runtime={"store": "host"}
    ),
}  # fmt: skip
