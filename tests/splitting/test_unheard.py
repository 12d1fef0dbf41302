"""Functions of which the tracer does not hear, as those of torch.jit, are refused with a cure, however it counts."""

import pytest
import torch
from torch import nn

from .plain_training import Model, equals_plain_training, inputs, pipeline


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


class Scripted(nn.Module):
    def forward(self, x):
        return scripted(x)


class Inner(Model):
    """The function is in a module of its own."""

    def __init__(self):
        super().__init__(lambda model, h: model.function(h))
        self.function = Scripted()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("stages", ["layer", 1, 2])
def test_a_function_of_torch_jit(stages):
    with pytest.raises(
        ValueError, match="that no torch function or module has made.* put that into a module of its own"
    ):
        pipeline(Model(lambda model, h: scripted(h)), inputs()[0], stages=stages)
    equals_plain_training(Inner(), inputs(6), stages=stages)
