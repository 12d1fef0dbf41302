"""`pipeback bench stability`: what is observed on a quadratic is what the polynomials say, and is written and drawn."""

import math

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes import bench, results
from pipeback.recipes.benches import stability
from pipeback.recipes.stability import figure, limits
from pipeback.recipes.stability.observed import GRID, largest
from pipeback.recipes.stability.polynomials import LAWS
from tests.helpers.choice import rare
from tests.recipes.cli import pipeback

FACTS = {"date": "2026-01-02", "commit": "abc1234", "machine": "a CPU, 2 cores, Linux x86_64", "torch": "2.14.1"}
ROWS = [
    limits.Row(method, m, d, LAWS["pb"].largest(m, d) * (2.0 if method == "ef" else 1.0),
               math.nan if method == "ef" else LAWS[method].largest(m, d))
    for m in (0.9, 0.99) for d in (4, 16) for method in ("pb", "cerebras", "ef")
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "m", "d"), [("pb", 0.9, 4), ("cerebras", 0.9, 4), rare("spectrain", 0.9, 4), rare("spectrain", 0.99, 16)]
)
def test_what_is_observed_is_what_the_polynomials_say(method, m, d):
    bound = LAWS[method].largest(m, d)
    assert largest(method, m, d, bound / 2, 2 * bound) == pytest.approx(bound, rel=GRID - 1)


@pytest.mark.soak
def test_weights_that_shrink_to_nothing_are_stable():
    """At this momentum and delay all modes far below the limit have died out after some thousand updates."""
    bound = LAWS["lwp_w_sc"].largest(0.99, 4)
    assert largest("lwp_w_sc", 0.99, 4, bound / 30, 2 * bound) == pytest.approx(bound, rel=GRID - 1)


def test_what_is_stable_everywhere_or_nowhere_is_told():
    bound = LAWS["pb"].largest(0.9, 4)
    assert largest("pb", 0.9, 4, bound / 4, bound / 2) == math.inf
    assert math.isnan(largest("pb", 0.9, 4, 2 * bound, 3 * bound))


@pytest.mark.soak
def test_a_file_is_read_as_it_was_written(tmp_path, monkeypatch):
    for module in (limits, figure):  # the last one has a delay of 336
        monkeypatch.setattr(module, "EXPERIMENTS", limits.EXPERIMENTS[:4])
    file = tmp_path / "stability.csv"
    limits.save(file, limits.Limits("pipeback bench stability", FACTS, ROWS))
    text = file.read_text()
    found = limits.read(text)
    assert limits.holds(text) and found.command == "pipeback bench stability" and found.facts == FACTS
    assert [row[:3] for row in found.rows] == [row[:3] for row in ROWS]
    assert found.over_pb(found.rows[2]) == pytest.approx(2.0, rel=1e-3)
    observed, experiments = limits.sheets(found)
    assert observed.head == ["momentum", "D", "D(1−m)", "pb: ηλ", "cerebras", "ef"] and observed.rows[0][-1] == "2.00"
    assert experiments.rows[3][:5] == ["Kosson et al., ResNet-20", "6.43e-06", "0.99918", "66", "0.054"]
    assert len(figure.draw(found).axes) == 2
    results.show(results.parsed([str(file), f"out={tmp_path / 'a.md'}"]), results.report_console())
    assert "12 limits." in (tmp_path / "a.md").read_text()


def test_rows_are_written_as_they_come_and_taken_over(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(limits, "largest", lambda *given: asked.append(given[:3]) or 0.5)
    file = tmp_path / "stability.csv"
    stability.main(1, methods="pb,ef", momenta="0.9", delays="4", out=str(file))
    stability.main(1, methods="ef,sc", momenta="0.9", delays="4", out=str(file))
    assert asked == [("pb", 0.9, 4), ("ef", 0.9, 4), ("sc", 0.9, 4)]
    assert {row.method for row in limits.read(file.read_text()).rows} == {"pb", "ef", "sc"}
    assert "Largest stable ηλ, observed" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    ("methods=braking", "methods=braking is not among pb, sc"),
    ("momenta=a", "momenta=a: no numbers; write for example momenta=0.9,0.99,0.999"),
    ("delays=a", "delays=a: no numbers; write for example delays=4,16,64"),
    *((f"momenta={m}", f"momenta={m}: a momentum is a number from 0 to 0.99999") for m in ("1", "1.5", "nan", "-0.5")),
    *((f"delays={d}", f"delays={d}: a delay is a whole number of at least 0") for d in ("-1", "0.5", "inf")),
    ("momenta=0", "momenta=0: lwp predicts from the velocity, which there is none of; leave 0 out, or give methods="),
    ("out=nowhere/x.csv", "out=nowhere/x.csv: there is no folder nowhere; make it first"),
    ("out=other.csv", "out=other.csv is no file of `pipeback bench stability`; name another"),
])  # fmt: skip
def test_mistakes(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "largest", lambda *_: pytest.fail("it was observed"))
    (tmp_path / "other.csv").write_text("hello")
    done = pipeback("bench", "stability", words, cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "other.csv").read_text() == "hello"


def test_without_momentum_the_methods_that_the_cure_names_are_observed(tmp_path):
    methods = stability.checked(["pb", "sc", "lwp_w_sc", "msnag", "ef"], "0", "4,16")
    assert methods == ([0.0], [4.0, 16.0])


def test_it_runs_only_if_it_is_named():
    assert "stability" not in bench.parsed([])[1] and bench.parsed(["stability"])[1] == ["stability"]
