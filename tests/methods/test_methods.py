"""The registry of methods, plug-ins from outside, composition, and the scaling rule."""

import sys

import pytest
import torch

import pipeback
from pipeback import methods
from pipeback.methods.momentum import spike
from tests.helpers.processes import in_a_new_process
from tests.laws.cases import CASES, data, network, pipeline, weights

NAMES = [
    "sgd", "gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "looped_bfs", "zb_v", "pb", "pipedream",
    "pipedream_2bw",
    "pipemare", "spectrain", "lwp", "sc", "cerebras", "ef", "pipeoptim", "msnag", "gap_aware", "dc_asgd", "braking",
    "staleness_lr", "eigendelay",
]  # fmt: skip


def test_the_names_of_the_field():
    assert methods.available()[: len(NAMES)] == NAMES
    assert {label.split("-")[0].split("+")[0] for label in CASES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_file_opens_with_its_equations(name):
    module = sys.modules[type(CASES[name](4)).__module__]
    opening = module.__doc__
    assert "w" in opening and ("←" in opening or "=" in opening)
    assert "Weight copies" in opening
    if name != "sgd":
        assert "arXiv" in opening


def test_unknown_names_and_options_suggest():
    with pytest.raises(ValueError, match="unknown method 'cerebas'; did you mean 'cerebras'"):
        methods.create("cerebas")
    with pytest.raises(ValueError, match="'lwp' has no option 'horizont'; did you mean 'horizon'"):
        methods.create("lwp", horizont=3)
    with pytest.raises(ValueError, match="'sgd' has no option 'slack'.*takes none"):
        methods.create("sgd", slack=1)
    with pytest.raises(ValueError, match="'pipedream_2bw' needs the option micro_batches="):
        methods.create("pipedream_2bw")


def test_slack_of_every_flowing_method():
    for name in (
        "pb", "pipedream", "spectrain", "lwp", "sc", "cerebras", "ef", "pipeoptim", "msnag", "gap_aware", "dc_asgd",
        "braking", "staleness_lr", "eigendelay",
    ):  # fmt: skip
        for slack in (0, 1, 2):
            assert methods.create(name, slack=slack).delays(4) == [slack * (3 - s) for s in range(4)]
    assert methods.create("pipemare", t1=False, slack=1).delays(4) == [3, 2, 1, 0]
    assert methods.create("pipedream_2bw", micro_batches=9, slack=2).delays(4) == [1] * 4


def test_2bw_refuses_groups_that_two_versions_cannot_serve():
    with pytest.raises(ValueError, match=r"micro_batches=3 is too few for 5 stages.*from 5"):
        pipeline(network(5), methods.create("pipedream_2bw", micro_batches=3))


PLUGIN = '''
import pipeback
from pipeback.schedules.programs import flowing

class Halved(pipeback.Method):
    """Predicts half as far as lwp."""
    copies = "scratch"
    def __init__(self, slack=2):
        self.slack, self.schedule = slack, flowing(slack)
    def init(self, weights):
        return {"moved": [w * 0 for w in weights]}
    def forward_weights(self, weights, state, when):
        return [w + 0.5 * when.delay * d for w, d in zip(weights, state["moved"])]
    def update(self, weights, optimizer, state, when):
        before = [w.clone() for w in weights]
        optimizer.step()
        return {"moved": [w - b for w, b in zip(weights, before)]}
'''


def trained_halved(folder):
    sys.path.insert(0, folder)
    assert "halved" in methods.available()

    class Same(type(methods.create("lwp"))):
        def forward_weights(self, weights, state, when):
            shift = super().forward_weights(weights, state, when)
            return pipeback.Shift(weights, [0.5 * c for c in shift.coefficients], shift.directions)

    half, same = pipeline(network(), "halved"), pipeline(network(), Same(form="weight"))
    for x, y in data(25):
        half.push(x, y), same.push(x, y)
    torch.testing.assert_close(weights(half), weights(same), rtol=1e-5, atol=1e-6)
    state = half.state_dict()
    half.drain()
    half.load_state_dict(state)
    return list(half.delays)


def test_an_outside_package_adds_a_method(tmp_path):
    """A real distribution on the path, with an entry point and nothing else."""
    (tmp_path / "halved.py").write_text(PLUGIN)
    info = tmp_path / "halved-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halved\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pipeback.methods]\nhalved = halved:Halved\n")
    assert in_a_new_process(trained_halved, str(tmp_path)) == [8, 6, 4, 2, 0]


def test_a_chain_of_methods_in_pieces_is_the_combination_under_its_own_name():
    whole, chained = (
        pipeline(network(), method)
        for method in ("cerebras", pipeback.chain(methods.create("lwp"), methods.create("sc")))
    )
    for x, y in data(30):
        whole.push(x, y)
        chained.push(x, y)
    assert torch.equal(weights(whole), weights(chained))


def test_a_chain_needs_one_schedule():
    with pytest.raises(ValueError, match="different schedules; give both the same slack="):
        pipeback.chain(methods.create("lwp", slack=1), methods.create("sc", slack=2))


def test_a_method_that_steps_itself_stands_last():
    with pytest.raises(ValueError, match="makes the step itself.*put it last"):
        pipeback.chain(methods.create("sc"), methods.create("lwp", form="weight"))
    with pytest.raises(ValueError, match="runs forwards on older versions"):
        pipeline(
            network(), pipeback.chain(methods.create("lwp", slack=1), methods.create("pipedream", vertical_sync=True))
        )


def test_options_are_checked_when_a_method_is_built():
    for name, options in [
        ("lwp", {"horizon": -1}), ("sc", {"horizon": "far"}), ("lwp", {"form": "w"}), ("spectrain", {"version": 3}),
        ("pipemare", {"anneal": 5, "warmup": 2.5}), ("pipemare", {"anneal": 5, "decay": 1.0}), ("pb", {"slack": -1}),
        ("pipedream", {"vertical_sync": "no"}), ("gpipe", {"micro_batches": 0}), ("ef", {"horizon": -1}),
        ("msnag", {"stash": 1}), ("gap_aware", {"decay": 1.0}), ("dc_asgd", {"strength": -1}),
        ("dc_asgd", {"decay": "much"}), ("braking", {"strength": None}), ("staleness_lr", {"scale": 0}),
        ("staleness_lr", {"power": float("inf")}), ("pipeoptim", {"micro_batches": 0}), ("eigendelay", {"sides": 3}),
        ("eigendelay", {"refresh": 0}), ("eigendelay", {"block": 0}), ("eigendelay", {"refresh_by_delay": -1}),
        ("eigendelay", {"decay": 1}), ("eigendelay", {"scale": 0}),
        ("eigendelay", {"second_moment": "new"}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="must|is a number of updates|counts micro-batches"):
            methods.create(name, **options)


def test_scaling_rule():
    rate, momentum = pipeback.scale_hyperparameters(0.1, 0.9, reference=256, size=32)
    assert (rate, momentum) == (pytest.approx(0.0016355, rel=1e-4), pytest.approx(0.98691628, abs=1e-8))
    rate, momentum = pipeback.scale_hyperparameters(0.1, 0.9, reference=128, size=1)
    assert (rate, momentum) == (pytest.approx(6.428e-6, rel=1e-3), pytest.approx(0.99917721, abs=1e-8))
    assert pipeback.scale_hyperparameters(0.1, 0.9, 32, 32) == (0.1, 0.9)
    with pytest.raises(ValueError, match="at least 1"):
        pipeback.scale_hyperparameters(0.1, 0.9, 32, 0)
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\)"):
        pipeback.scale_hyperparameters(0.1, 1.0, 32, 1)


def test_spike_compensation_without_decay_is_its_limit():
    assert spike(1.0, 3) == (1.0, 3)
    assert spike(1 - 1e-9, 3)[1] == pytest.approx(3)


def test_options_that_came_later_are_not_asked_of_earlier_states():
    """A state of version 0.2.0 has `{"slack": 2}` of pb, and pb says no more of itself where it does the same."""
    assert methods.create("pb").options() == {"slack": 2}
    assert repr(methods.create("pb")) == "PipelinedBackpropagation(slack=2)"
    assert methods.create("pb", late=1, placement="v").options() == {"slack": 2, "placement": "v", "late": 1}
