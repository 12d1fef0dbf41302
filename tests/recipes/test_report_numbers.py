"""The numbers of a report, computed by hand."""

import math

import numpy as np
import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes.reports import heat_maps
from pipeback.recipes.reports.metric import Metric, mean_and_deviation, spread
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, gather
from pipeback.recipes.reports.sources import Run, read
from pipeback.recipes.reports.summary import divergence, glance, lead, unfinished
from pipeback.recipes.reports.tables import differences, tables
from pipeback.recipes.reports.target import reference, target
from tests.recipes.reporting import runs
from tests.recipes.synthetic import facts, rows, write


def test_mean_and_spread():
    assert mean_and_deviation([3.0]) == (3.0, None)
    assert mean_and_deviation([0.1, 0.1, 0.1]) == (0.1, 0.0)
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)))
    assert spread([0.90, 0.94], ".1f", 100) == "92.0 ±2.8"
    assert spread([], ".1f") == "–"
    assert spread([30_000.0, 50_000.0], ".2f") == "4e+04 ±1e+04"


def test_table_holds_hand_computed_numbers():
    # 320 samples an epoch, validated every 160: the second value is epoch 1, the fourth epoch 2
    by_hand = {name: [[0.5, *v[:1], 0.8, *v[1:]] for v in values] for name, values in
               {"sgd": [(0.90, 0.96), (0.94, 0.98)], "pb": [(0.70, 0.90), (0.80, 0.94)]}.items()}  # fmt: skip
    methods = gather([Run(facts(name, seed), rows(values, every=5), {}, f"{name}{seed}")
                      for name, seeds in by_hand.items() for seed, values in enumerate(seeds)])  # fmt: skip
    found = {table.name: table for table in tables(methods, target(methods))}
    assert [" ".join(name.split()) for name in found["methods"].head] == [
        "method", "update size", "D at stage 0", "accuracy % epoch 1", "accuracy % epoch 2", "held-out loss",
        "training loss",
    ]  # fmt: skip
    assert found["methods"].rows == [
        ["sgd", "1", "0", "92.0 ±2.8", "97.0 ±1.4", "0.30 ±0.00", "0.15 ±0.00"],
        ["pb", "1", "6", "75.0 ±7.1", "92.0 ±2.8", "0.30 ±0.00", "0.15 ±0.00"],
    ]
    numbers = dict(zip(found["methods"].numbers[0], found["methods"].numbers[2], strict=True))
    assert numbers["method"] == "pb" and numbers["runs"] == 2
    assert numbers["accuracy % epoch 1"] == pytest.approx(75)
    assert numbers["accuracy % epoch 1 deviation"] == pytest.approx(math.sqrt(50))
    assert found["cost"].rows[0] == ["sgd", "100 ±0", "90 ±0", "2", "0", "0.5", "1.3"]


def test_time_to_target_by_hand():
    methods = runs(("sgd", [[0.5, 0.8, 0.9, 1.0]]), ("pb", [[0.1, 0.95, 0.8, 1.0], [0.1, 0.2, 0.96, 1.0], [0.1] * 4]))
    goal = target(methods)
    assert goal == (pytest.approx(0.95), "5 % short of what sgd reaches in the end")
    sgd, pb = methods
    assert sgd.first(0.95) == [39]
    # 32 samples a batch, a validation every 10 batches, 100 samples a second: the first measurement at 95 % counts
    assert pb.until(0.95, SAMPLES) == [640, 960] and pb.until(0.95, SECONDS) == [6.4, 9.6]
    assert pb.until(0.95, STEPS) == [19, 29]
    (table,) = [t for t in tables(methods, goal) if t.name == "target"]
    assert table.title == "Time to 95.0 %"
    assert table.rows == [
        ["sgd", "1 of 1", "1,280", "39", "12.8"],
        ["pb", "2 of 3", "800 ±226", "24 ±7", "8.0 ±2.3"],
    ]
    assert target(methods, "90%").value == target(methods, 0.9).value == pytest.approx(0.9)


def test_curve_is_the_mean_over_seeds():
    a = Run(facts("pb", 0), rows([0.2, 0.4, 0.6], rate=100.0), {}, "a")
    b = Run(facts("pb", 1), rows([0.4, 0.8, 0.6], rate=50.0), {}, "b")
    c = Run(facts("pb", 2), rows([0.5], every=20), {}, "c")  # measured elsewhere: adds to the one point that it has
    (m,) = gather([a, b])
    assert m.curve(SAMPLES).x == [320, 640, 960] and m.curve(STEPS).x == [9, 19, 29]
    assert m.curve(SAMPLES).mean == pytest.approx([0.3, 0.6, 0.6])
    assert m.curve(SECONDS).x == pytest.approx([4.8, 9.6, 14.4])  # 3.2 and 6.4 seconds a validation
    (m,) = gather([a, b, c])
    assert m.curve(SAMPLES).values == [[0.2, 0.4], pytest.approx([0.4, 0.8, 0.5]), [0.6, 0.6]]


def test_the_drained_measurement_replaces_the_one_before_it():
    logged = rows([0.4, 0.6])
    again = {**logged[-1], "step": 20, "val/accuracy": 0.7}  # measured once more, a step but no sample later
    (m,) = gather([Run(facts("pb"), [*logged, again], {}, "a")])
    assert m.held_out == [[(9, 0.4), (20, 0.7)]] and m.after(2) == m.finals == [0.7]


def test_divergence_is_counted_and_kept_out_of_the_means():
    methods = runs(("sgd", [[0.9, 0.9]]), ("pb", [[0.9, 0.8], [0.9, math.nan]]), ("sc", [[math.nan, 0.1]]))
    _, pb, sc = methods
    assert (pb.diverged, sc.diverged) == ([False, True], [True])
    assert pb.finals == [0.8] and pb.fate == "" and sc.fate == "diverged"
    assert pb.curve(STEPS).values == [[0.9, 0.9], [0.8]]  # a run counts until it diverges
    assert divergence(methods) == "2 of 4 runs (pb 1 of 2, sc 1 of 1)"
    table = tables(methods, None)[0]
    assert table.head[-1] == "runs\ndiverged" and [row[-1] for row in table.rows] == ["0 of 1", "1 of 2", "1 of 1"]
    assert "diverged" in table.rows[2]


def test_a_loss_above_guessing_is_unstable():
    (m,) = gather([Run(facts("pb"), rows([0.1, 0.1], loss=5.0), {}, "a")])
    assert m.fate == "unstable" and "†" in tables([m], None)[0].rows[0][0]
    (m,) = gather([Run(facts("pb", classes=None), rows([0.1, 0.1], loss=5.0), {}, "a")])
    assert m.fate == ""  # what guessing costs is not known


def test_perplexity_is_better_when_lower():
    def lm(name, values):
        named = facts(name, metric="val/perplexity", mode="min", classes=None, epochs=3)
        return Run(named, rows(values, column="val/perplexity"), {}, name)

    methods = gather([lm("sgd", [40.0, 20.0, 10.0]), lm("pb", [50.0, 10.4, 12.0]), lm("sc", [9.0, 30.0, 11.0])])
    goal = target(methods)
    assert goal.value == pytest.approx(10.5)
    assert [m.first(goal.value) for m in methods] == [[29], [19], [9]]
    assert glance(methods, goal)["Best perplexity at the end"] == "sgd, 10.00"
    assert tables(methods, goal)[0].head[5] == "perplexity\nepoch 3" and tables(methods, goal)[0].rows[0][5] == "10.00"
    assert target(methods, 12).value == 12.0
    assert reference(methods).label == "sgd" and reference(methods[1:]).label == "sc"


def test_metric_reads_and_writes_values():
    accuracy, bleu = Metric("val/accuracy"), Metric("val/bleu")
    assert (accuracy.text(0.971), bleu.text(23.456), Metric("val/perplexity", "min").text(5.0)) == (
        "97.1 %",
        "23.5",
        "5.00",
    )
    assert (accuracy.parse("97.5 %"), accuracy.parse(1), bleu.parse("23.5")) == (0.975, 1.0, 23.5)
    for metric, text in ((accuracy, "high"), (accuracy, "90"), (accuracy, "nan"), (bleu, "20%")):
        with pytest.raises(ValueError, match="target"):
            metric.parse(text)


def test_runs_of_one_name_that_differ_stay_apart():
    def run(seed, lr, config=True):
        chosen = {"seed": seed, "out": f"x{seed}", "optimizer": {"lr": lr}, "data": {"root": f"d{seed}"}}
        return Run(
            facts("pb", seed, optimizer={"lr": lr / 32}), rows([0.5 + lr]), chosen if config else {}, f"{seed}{lr}"
        )

    methods = gather([run(0, 0.1), run(1, 0.1), run(0, 0.2)])
    assert [(m.label, len(m.runs), m.base) for m in methods] == [("pb lr=0.1", 2, "pb"), ("pb lr=0.2", 1, "pb")]
    methods = gather([run(0, 0.1), run(1, 0.1), run(0, 0.2, config=False)])  # then by what is known of all: the facts
    assert [m.label for m in methods] == ["pb lr=0.003125", "pb lr=0.00625"]
    methods = gather([Run(facts("pb", experiment=name), rows([0.5]), {}, name) for name in ("digits", "cifar10")])
    assert [m.label for m in methods] == ["pb, cifar10", "pb, digits"]


def test_options_that_differ():
    def run(name, seed, **more):
        config = {"seed": seed, "model": {"depth": 3}, "optimizer": {"lr": 0.1}, "trainer": {"strategy": {"x": name}}}
        return Run(facts(name, seed, **more), rows([0.5]), config, f"{name}{seed}")

    flush = {"method_options": {"name": "gpipe", "micro_batches": 8}, "optimizer": {"name": "SGD", "lr": 0.1}}
    methods = gather([run("sgd", 0), run("sgd", 1), run("gpipe", 0, **flush), run("gpipe", 1, **flush)])
    table = differences(methods)
    assert table.head == ["method", "options", "optimizer.lr", "optimizer.momentum"]
    assert table.rows == [["sgd", "–", "0.003", "0.997"], ["gpipe", "micro_batches=8", "0.1", "–"]]
    assert differences(methods[:1]) is None


def test_equal_delay_has_its_own_table():
    methods = runs(("sgd", [[0.9]]), ("pb", [[0.8]]), ("pipedream", [[0.8]]), ("pipedream_slack2", [[0.7]]))
    found = {table.name: [row[0] for row in table.rows] for table in tables(methods, None)}
    assert found["methods"] == ["sgd", "pb", "pipedream"]
    assert found["equal_delay"] == ["sgd", "pb", "pipedream_slack2"]


def test_heat_map_is_the_mean_over_seeds():
    a, b = (
        [Run(facts("pb", n), rows([0.5, 0.5], gaps=gaps), {}, str(n))]
        for n, gaps in enumerate([[4.0, 2.0, 0.0], [2.0, 2.0, 0.0]])
    )
    (m,) = gather([*a, *b])
    found = heat_maps.field(m, "gap")
    assert list(found.steps) == [9, 19]
    np.testing.assert_allclose(found.values, [[3.0, 1.5], [2.0, 1.0], [0.0, 0.0]])
    assert heat_maps.field(m, "clip_share") is None
    fresh = gather([Run(facts("sgd"), rows([0.5], gaps=[0.0, 0.0]), {}, "s")])
    assert heat_maps.fields([m, *fresh], "gap")[1] == ["sgd"]


def test_summary_sentences():
    methods = runs(("sgd", [[0.5, 0.9, 0.96]]), ("pb", [[0.5, 0.95, 0.97], [0.5, 0.95]]))
    assert lead(methods) == "2 methods, 4 stages, 320 training samples, 2 epochs, 1 to 2 seeds"
    assert glance(methods, target(methods)) == {
        "Best accuracy at the end": "sgd, 96.0 %",
        "Fewest samples to 91.2 %": "pb, 640 samples",
        "Least time to 91.2 %": "pb, 6.4 s",
        "Diverged": "none of 3 runs",
    }
    assert unfinished(methods) == ["a run of pb ended after 640 of 960 samples"]


def test_the_order_of_the_folders_does_not_matter(tmp_path):
    for name, seed in (("a", 1), ("b", 0), ("c", 10), ("d", 2)):
        write(tmp_path / name, facts("pb", seed), rows((0.3, 0.5, 0.8, 0.9 + seed / 1000)))
    (method,) = gather(read([tmp_path])[0])
    assert [run.facts["seed"] for run in method.runs] == [0, 1, 2, 10]
