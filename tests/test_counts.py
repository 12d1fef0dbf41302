"""Plurals: what is one is said as one, in messages, reprs and printed tables."""

import doctest
import re

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import counts

NOUNS = "stage|micro-batch|worker|replica|sample|layer|module|parameter|run|seed|model|device"


def test_the_doctests():
    failed, attempted = doctest.testmod(counts)
    assert not failed and attempted


def test_one_stage_and_one_micro_batch():
    pipe = pipeback.Pipeline(
        [nn.Linear(6, 6)], loss=mse_loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), method="pb"
    )
    pipe.record()
    watch = pipe.watch()
    pipe.push(torch.randn(1, 6), torch.randn(1, 6))
    said = [
        repr(pipe),
        repr(watch),
        str(pipe.split),
        repr(pipe.split),
        str(pipe.plan(torch.randn(1, 6), torch.randn(1, 6))),
    ]
    assert all(re.search(r"\b1 stage\b", each) for each in said), said
    assert not any(re.search(rf"\b1 (?:{NOUNS})e?s\b", each) for each in said), said
    pipe.close()
