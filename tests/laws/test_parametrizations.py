"""Law: weights that are functions of others train as in torch where B has F's weights; else they are refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.laws.cases import data
from tests.laws.plain import pipeline, same

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()


def parametrized(kind):
    def build():
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(3)]
        if kind == "weight_norm":
            layers = [parametrizations.weight_norm(layer) for layer in layers]
        elif kind == "old weight_norm":
            layers = [nn.utils.weight_norm(layer) for layer in layers]
        elif kind == "spectral_norm":
            layers = [parametrizations.spectral_norm(layer) for layer in layers]
        elif kind == "old spectral_norm":
            layers = [nn.utils.spectral_norm(layer) for layer in layers]
        elif kind == "orthogonal":
            layers = [parametrizations.orthogonal(layer, orthogonal_map="cayley") for layer in layers]
        elif kind == "symmetric":
            for layer in layers:
                parametrize.register_parametrization(layer, "weight", Symmetric())
        else:
            for layer in layers:
                prune.random_unstructured(layer, "weight", 0.3)
        return nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in layers])

    return build


KINDS = ["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm", "orthogonal", "symmetric", "pruned"]
CHEAP = "weight_norm", "old weight_norm", "pruned"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_weights_where_b_has_fs_weights(kind):
    same(parametrized(kind), data(13))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_weights_are_stashed_by_pipedream(kind):
    """The gradient is the true one at the stale weights: plain autograd, a copy of the model a version."""
    some, build = data(11), parametrized(kind)
    model = build()
    pipe = pipeline(model, "pipedream", lambda p: torch.optim.SGD(p, lr=0.05))
    losses = [pipe.push(x, y) for x, y in some]
    pipe.drain()
    if "spectral" in kind:  # its power iteration moves at every F, of which versions know nothing
        assert torch.stack(losses).isfinite().all()
        return
    twin = build()
    history = [[stage] for stage in twin]
    for j, (x, y) in enumerate(some):
        used = [history[s][max(0, j - (2 - s))] for s in range(3)]
        for stage in used:
            stage.zero_grad()
        loss = nn.functional.mse_loss(nn.Sequential(*used)(x), y)
        loss.backward()
        assert torch.equal(losses[j], loss.detach())
        for s in range(3):
            new = build()[s]  # not a copy: the old ones keep what they computed, with its graph
            new.load_state_dict(history[s][j].state_dict())
            with torch.no_grad():
                for p, q in zip(new.parameters(), used[s].parameters(), strict=True):
                    p.sub_(q.grad, alpha=0.05)
            history[s].append(new)
    for s in range(3):
        for a, b in zip(model[s].parameters(), history[s][-1].parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["pb", "cerebras", "pipemare"])
def test_functions_of_weights_are_refused_where_b_has_others(case, kind):
    """But for those that are cheap to make anew; tests/laws/test_afresh.py has their law."""
    pipe = pipeline(parametrized(kind)(), case)
    (x, y), *_ = data(1)
    if kind in CHEAP:
        assert torch.isfinite(pipe.push(x, y))
        return
    with pytest.raises(ValueError, match=r"stage [01] \([01]\): its graph saves a function of the weights"):
        pipe.push(x, y)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["disk", "replicas"])
def test_models_with_functions_of_weights_are_copied(kind, where, tmp_path):
    """For `pipe.model` with a store on disk, and for replicas."""
    found = []
    options = {"store": f"disk:{tmp_path}"} if where == "disk" else {"replicas": 2}
    for given in (options, {}):
        pipe = pipeline(parametrized(kind)(), "gpipe", lambda p: torch.optim.SGD(p, lr=0.05), **given)
        for x, y in data(4, 8):
            pipe.push(x, y)
        pipe.drain()
        model = pipe.model.eval()
        with torch.no_grad():
            found.append((model(x), *model.parameters()))
        pipe.close()
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted)
