"""The recorder of functions of the weights: what it knows of memory ends with the tensors that lay there."""

import torch

from pipeback.splitting.provenance import WEIGHTS, memory_of
from pipeback.stages.recomputed_functions import Recorder


def test_memory_that_was_written_into_may_belong_to_a_function_of_the_weights_later():
    x, w = torch.randn(5, 8), torch.nn.Parameter(torch.randn(5, 8))
    written, again = set(), 0
    with Recorder([x], [w]) as recorder, torch.no_grad():
        for _ in range(200):
            activation = x * 2
            activation.add_(1)
            written.add(memory_of(activation))
            del activation
            scale = 1 + w
            assert recorder.of(scale) == WEIGHTS
            source = recorder.source(scale)
            assert source is not None and torch.equal(source.make(), scale)
            again += memory_of(scale) in written
    assert again, "torch has never given the same memory again"


def test_what_is_written_into_has_no_recipe():
    x, w = torch.randn(5, 8), torch.nn.Parameter(torch.randn(5, 8))
    with Recorder([x], [w]) as recorder, torch.no_grad():
        scale = 1 + w
        scale.view(-1)[:3] *= 2
        assert recorder.source(scale) is None
