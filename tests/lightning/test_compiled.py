"""Compiled stages under Lightning: the losses of uncompiled ones, to rounding."""

import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.helpers.choice import rare
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler")
@pytest.mark.parametrize("compiled", [{"backend": "aot_eager"}, rare(True)], ids=str)
def test_losses_are_those_of_uncompiled_stages(compiled):
    found = []
    for compile in (False, compiled):
        module = Regression()
        trainer(strategy("pb", compile=compile), precision="64-true").fit(module, loader(6))
        found.append(torch.stack(module.losses))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("always:torch.compile has compiled")
@pytest.mark.parametrize("options", [{"method": "pb"}, {"method": "gpipe", "module": "self"}], ids=str)
def test_a_module_that_torch_compile_was_given_trains_as_it_was(options):
    found = []
    for compile in (lambda module: module, partial(torch.compile, backend="eager")):
        module = Regression()
        run = trainer(strategy(**options))
        with pytest.warns(UserWarning, match="compiled Regression") if found else nullcontext():
            run.fit(compile(module), loader(6))
        found.append(weights(module))
        assert not {"forward", "training_step"} & set(vars(module))
    assert torch.equal(*found)
