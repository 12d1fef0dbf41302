"""Forwards that showed a fault once, each under what went wrong."""

from .forward import Forward

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
    "a graph of the loss had no gradient where the stage has none": Forward(
        layers=("linear", "attention"),
        steps=(("stacked", 0, False), (0, 0, False), (1, 0, True), ("rotated", 0, False), ("flipped", 0, False),
               ("placed", 0, False)),
        runtime={"vectorize": "auto"},
    ),
    "functions of the weights had no recipe in memory that had been written into": Forward(
        layers=("gru", "named", "weight norm"),
        steps=(("added", 0, False), (0, 0, False), ("counted", 0, False), (1, 0, True), (2, 0, True), (1, 0, False),
               (0, 0, True), ("view added", 1, False)),
        method="spectrain", stages=2, form="lengths", runtime={"store": "host"},
    ),
}  # fmt: skip
