"""Weights that are cut are other parameters, which keep what the user has noted on theirs."""

from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.spread import spread
from tests.processes.tensor_cases import PERCEPTRON, perceptron


def test_what_is_noted_on_a_weight_stays_on_its_shard():
    model = perceptron()
    weight = model[0].up.weight
    weight.no_decay = True
    done = spread(model, PERCEPTRON, TensorGroup(1, 2))
    shard = model[0].up.weight
    assert shard.shape != weight.shape and shard.no_decay
    done.undo()
    assert model[0].up.weight is weight
