"""Checkpoints: the same bits after the files, and always a whole one, whatever happens to disk and process."""

import math

import pytest
import torch

from pipeback import checkpoint
from pipeback.checkpoint.save_and_load import CheckpointError
from pipeback.tensors.layout import form_of
from tests.checkpoint.saved import Held, process, same, trained
from tests.helpers.checkpoint_faults import LAYERS, METHODS, layered, resume
from tests.helpers.choice import rare
from tests.laws.cases import data, everything

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


@pytest.mark.parametrize("every", [False, rare(True)])
def test_resume_in_a_new_process(every, tmp_path):
    """Methods and layers, in flight, each method at least once, or each with every layer; every other one goes on with
    two workers where there were none.
    """
    pairs = [(a + b, layer, method) for a, layer in enumerate(LAYERS) for b, method in enumerate(METHODS)]
    some = [(n, layer, method) for n, (both, layer, method) in enumerate(pairs) if every or both % 3 == 0]
    assert {method for _, _, method in some} == set(METHODS)
    for n, layer, method in some:
        pipe, batches = layered(layer, method, workers=None if n % 3 else 2)
        at = 9 + n % 5
        for x, y in batches[:at]:
            pipe.push(x, y)
        path = tmp_path / f"{layer}-{method}-{2 * (n % 2)}"
        checkpoint.save(pipe, tmp_path / "new", facts={"at": at}).rename(path)
        assert all(map(same, checkpoint.read(path)["stages"], pipe.state_dict()["stages"]))
        for x, y in batches[at:]:
            pipe.push(x, y)
        wanted = everything(pipe)
        pipe.drain()
        torch.save(torch.cat([wanted, everything(pipe)]), path / "wanted.pt")
        pipe.close()
    (tmp_path / "new").rmdir()
    rows = process(resume, tmp_path)
    assert len(rows) == len(some) and [row for row in rows if not row.startswith("True")] == []


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (3, 2)])
def test_another_number_of_workers(before, after, tmp_path):
    whole, first, second = trained(20), trained(11, workers=before), trained(0, seed=4, workers=after)
    checkpoint.save(first, tmp_path)
    checkpoint.load(second, tmp_path)
    for x, y in data(20)[11:]:
        second.push(x, y)
    assert torch.equal(everything(whole), everything(second))


def test_before_the_first_push_and_after_a_drain(tmp_path):
    for count in (0, 6):
        pipe, other = trained(count), trained(3, seed=4)
        pipe.drain()
        checkpoint.load(other, checkpoint.save(pipe, tmp_path))
        for x, y in data(9):
            pipe.push(x, y)
            other.push(x, y)
        assert torch.equal(everything(pipe), everything(other))


def test_every_kind_of_tensor(tmp_path):
    base = torch.randn(9, 9)
    odd = torch.tensor([0x7FC00001, 0x7F800000, -0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    stage = {
        "weight/ünïcode.0": base[3:5], "column": base[:, 1], "transposed": base.t(), "expanded": base[2].expand(4, 9),
        "number": base[0, 0], "none of it": base[:0], "window": base[1:, 2:5], "nan with payload": odd,
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "one": torch.randn(1, 5)[:, ::2],
        "overlapping": torch.arange(12.0).unfold(0, 4, 2), "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(3).half(), "brain": torch.randn(5).bfloat16()[1:], "flags": torch.rand(7) > 0.5,
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16), "counter": torch.tensor(2**62),
        "double complex": torch.randn(3, dtype=torch.complex128)[1:],
        "complex number": torch.tensor(1 + 2j, dtype=torch.complex128),
    }  # fmt: skip
    path = checkpoint.save(Held(stage, {}), tmp_path)
    found = checkpoint.read(path)
    for name, tensor in stage.items():
        got = found["stages"][0][name]
        assert form_of(got) == form_of(tensor), name
        bits = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) if t.dim() else t for t in (got, tensor)]
        assert torch.equal(*bits), name
    assert found["stages"][1] == {}
    assert math.isnan(found["plain"]["rate"]) and found["plain"]["bound"] == -math.inf
    odd = torch.eye(3).to_mkldnn()
    with pytest.raises(CheckpointError, match="a is a torch._mkldnn tensor"):
        checkpoint.save(Held({"a": odd}), tmp_path)


def test_nan_in_the_weights_and_in_the_facts(tmp_path):
    pipe, other = trained(9), trained(2, seed=3)
    pipe.model[1][0].weight.data[0, 0] = math.nan
    facts = checkpoint.load(
        other, checkpoint.save(pipe, tmp_path, facts={"best": math.nan, "worst": math.inf, "n": [1, None]})
    )
    assert math.isnan(facts["best"]) and facts["worst"] == math.inf and facts["n"] == [1, None]
    assert torch.equal(everything(pipe).nan_to_num(7.0), everything(other).nan_to_num(7.0))


def test_only_some_stages(two):
    whole, some = (checkpoint.read(two / "step-00000009", stages) for stages in (None, [1, 3]))
    assert [bool(tensors) for tensors in some["stages"]] == [False, True, False, True, False]
    assert same(some["stages"][3], whole["stages"][3])
