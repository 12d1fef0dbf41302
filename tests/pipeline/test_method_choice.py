"""A name is enough, and so is none: options are derived, the optimizer decides, and what was guessed is said once."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from tests.laws.cases import network

OPTIMIZERS = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "cerebras", None),
    "no momentum": (lambda p: torch.optim.SGD(p, lr=0.1), "pipedream", "SGD with momentum=0"),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "pipedream", "SGD with nesterov="),
    "Adam": (lambda p: torch.optim.Adam(p), "pipedream", "the optimizer is Adam"),
    "AdamW": (lambda p: torch.optim.AdamW(p), "pipedream", "the optimizer is AdamW"),
}


def pipeline(optimizer, **options):
    return pipeback.Pipeline(network(5), loss=mse_loss, optimizer=OPTIMIZERS[optimizer][0], **options)


def trained(pipe):
    torch.manual_seed(1)
    for _ in range(8):
        pipe.push(torch.randn(3, 6), torch.randn(3, 6))
    return torch.cat([p.detach().flatten() for p in pipe.model.parameters()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_method_the_optimizer_decides(optimizer):
    _, name, said = OPTIMIZERS[optimizer]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipe = pipeline(optimizer)
    told = [str(w.message) for w in found if "method=" in str(w.message)]
    if said is None:
        assert not told
    else:
        (text,) = told
        assert f'method="{name}" is taken' in text and said in text
    assert repr(pipe.method) == repr(methods.create(name))
    assert torch.equal(trained(pipe), trained(pipeline(optimizer, method=name)))


@pytest.mark.parametrize("optimizer", [name for name, (*_, said) in OPTIMIZERS.items() if said])
@pytest.mark.parametrize("method", ["cerebras", "spectrain"])
def test_a_refusal_types_the_methods_that_allow_the_optimizer(optimizer, method):
    with pytest.raises(ValueError, match=r"stage 0 \(0\): .*or one of those that allow it: ") as error:
        pipeline(optimizer, method=method)
    cures = re.findall(r'method=(pipeback\.methods\.create\(.*?\)|"\w+")', str(error.value))
    assert len(cures) >= 8 and cures[0].startswith("pipeback")
    for cure in cures:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert trained(pipeline(optimizer, method=eval(cure, {"pipeback": pipeback}))).isfinite().all()
    allowed = {cure.strip('"') for cure in cures[1:]}
    for name in set(methods.available()) - allowed:
        with pytest.raises(ValueError, match="allow it"):
            pipeline(optimizer, method=name)


def test_pipedream_2bw_by_its_name_has_as_few_micro_batches_as_two_versions_allow():
    pipe = pipeline("AdamW", method="pipedream_2bw")
    assert pipe.method.micro_batches == 5
    assert torch.equal(
        trained(pipe), trained(pipeline("AdamW", method=methods.create("pipedream_2bw", micro_batches=5)))
    )


def test_pipemare_by_its_name_says_what_it_was_given():
    with pytest.warns(UserWarning, match="method='pipemare' is taken with anneal=1000, .* of 4000 updates") as said:
        pipe = pipeline("AdamW", method="pipemare")
    (cure,) = re.findall(r"set it by method=(.*\))", str(said[0].message))
    again = pipeline("AdamW", method=eval(cure, {"pipeback": pipeback}))
    assert torch.equal(trained(pipe), trained(again))


def test_a_factory_that_fails_is_told_as_before():
    def broken(params):
        raise RuntimeError("no optimizer today")

    with pytest.raises(RuntimeError, match="no optimizer today"):
        pipeback.Pipeline(nn.Sequential(nn.Linear(2, 2)), loss=mse_loss, optimizer=broken)
    with pytest.raises(TypeError, match="optimizer must be a function from parameters"):
        pipeback.Pipeline(nn.Sequential(nn.Linear(2, 2)), loss=mse_loss, optimizer=lambda p: 1)
