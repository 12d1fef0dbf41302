"""The search: exact, quick, and clear about what does not fit."""

import json
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from pipeback.planner import Loss, Model, devices, ranking, search
from pipeback.planner.candidates import Fixed, candidates
from pipeback.planner.estimates import complete, estimate
from pipeback.planner.hardware import device
from pipeback.planner.options import Option
from pipeback.planner.refusals import NothingFits
from pipeback.planner.search import question, within
from pipeback.planner.techniques import technique
from tests.helpers.choice import rare

SMALL = Model.gpt(8, 1024, 16, context=512)


@pytest.fixture(scope="module")
def found():
    return search("gpt:13b", "64xA100", tokens=300e9, fixed=Fixed(stores=("device", "host", "disk")))


def test_options_are_ranked_by_the_days_to_the_target(found):
    assert len(found) > 10 and found.best is found[0]
    assert all(a.days <= b.days for a, b in pairwise(found))
    for one in found:
        assert one.fits and one.option.devices == 64
        assert one.days == pytest.approx(one.plain_days * one.slow.factor * one.batch_factor)
        assert 0 < one.mfu < 1 and 0 <= one.bubble < 1
        assert sum(one.losses.values()) < 1


def test_no_option_is_better_than_the_best():
    """Every candidate simulated, against the few that the search simulates."""
    for methods in ("one_f_one_b", "zb_h1", "pipedream_2bw", "interleaved", "looped_bfs", "zb_v"):
        asking = question(SMALL, tokens=1e9, methods=methods)
        job = asking.job(devices("8xA100"))
        every = [one for one in candidates(job, asking.techniques, asking.fixed) if one.fits]
        days = [estimate(job, one.option).days for one in every]
        assert all(one.days <= exact * (1 + 1e-9) for one, exact in zip(every, days, strict=True))
        assert asking.answer(devices("8xA100")).best.days == pytest.approx(min(days))


def test_few_of_a_thousand_devices_options_are_simulated(monkeypatch):
    """Which makes the search quick: a simulation takes the longest, and the rest takes as long as there are options."""
    tried, simulated = [], []

    def counted(*given):
        tried.extend(candidates(*given))
        return tried

    def completed(*given):
        simulated.append(given)
        return complete(*given)

    monkeypatch.setattr(ranking, "candidates", counted)
    monkeypatch.setattr(ranking, "complete", completed)
    found = search("gpt:175b", "1024xA100", tokens=300e9, fixed=Fixed(stores=("device", "host", "disk")))
    assert len(found) > 20 and 1000 < len(tried) < 10_000
    assert len(simulated) < len(tried) / 20


def test_every_method_is_ranked_in_whatever_order_they_are_named():
    """What has no pipeline is no method's, takes no method's place, and has no delay."""
    names = ("pipedream_2bw", "one_f_one_b", "zb_h1")
    tables = [{row[1:] for row in search("gpt:1.3b", "16xA100", methods=some).rows()} for some in permutations(names)]
    assert all(rows == tables[0] for rows in tables)
    assert {row[0] for row in tables[0]} == {*names, "sharded", "data parallel"}
    alone = search("gpt:1.3b", "16xA100", methods="pipedream_2bw")
    assert {one.title for one in alone} == {"pipedream_2bw", "sharded", "data parallel"}
    assert all(one.option.delay == (one.title == "pipedream_2bw") for one in alone)


def test_what_is_fixed_is_kept(found):
    fixed = Fixed(stages=(4,), tensor=(2,), replicas=(8,), micro_batch=(2,), batch=128, recompute=("full",))
    for one in search("gpt:13b", "64xA100", fixed=fixed, methods="one_f_one_b,zb_h1"):
        option = one.option
        assert (option.pipeline, option.tensor, option.data, option.micro_batch) == (4, 2, 8, 2)
        assert option.batch == 128 and option.recompute == "full"


def test_delays_and_batches_have_a_price():
    free = Loss(critical_batch=1e12, slow={"pb": 0.0, "pipedream": 0.0})
    dear = Loss(critical_batch=1e12, slow={"pb": 1.0, "pipedream": 0.0})
    fixed = Fixed(stages=(8,), tensor=(1,), micro_batch=(4,))
    one, other = (
        search(SMALL, "8xA100", methods="pb,pipedream", target=target, fixed=fixed) for target in (free, dear)
    )
    days = [{one.title: one.days for one in each} for each in (one, other)]
    assert days[0]["pb"] == pytest.approx(days[1]["pb"] / (1 + 1.0 * (sum((2 * n) ** 2 for n in range(8)) / 8) ** 0.5))
    assert days[0]["pipedream"] == days[1]["pipedream"]
    assert next(one for one in other if one.title == "pb").binds == "delay"
    small = search(SMALL, "8xA100", methods="gpipe", target=Loss(critical_batch=1e3), fixed=Fixed(stages=(8,)))
    assert small.best.batch_factor > 1.5 and small.best.binds in ("batch", "bubble")


def test_the_price_of_delays_is_published_assumed_or_given():
    plain = Loss()
    pipedream, spectrain = technique("pipedream"), technique("spectrain")
    assert plain.delay(pipedream, 32, "adamw").known == "published"
    assert plain.delay(pipedream, 32, "adamw").factor == pytest.approx(5.81, rel=0.02)  # what was published
    assert plain.delay(pipedream, 64, "adamw").known == "assumed"  # beyond what was measured
    assert plain.delay(spectrain, 4, "sgd").factor == 1.0 < plain.delay(spectrain, 5, "sgd").factor
    assert plain.delay(technique("cerebras"), 20, "sgd", samples=1).known == "published"
    assert plain.delay(technique("cerebras"), 20, "sgd", samples=64).known == "assumed"
    assert plain.delay(technique("gpipe"), 32, "adamw") == (1.0, 0.0, "no delay", "")
    given = Loss(slow={"PipeDream2BW": 0.1}).delay(technique("pipedream_2bw"), 4, "sgd")
    assert given.kappa == 0.1 and given.known == "given"  # whatever its case, as in methods=
    assert Loss(slow={"pb": 0.1}, calibrated="mine.json").delay(technique("pb"), 4, "sgd").source == "mine.json"


def test_json_and_tables(found):
    whole = json.loads(json.dumps(found.as_json()))
    assert len(whole["options"]) == len(found) and whole["options"][0]["days"] == found.best.days
    assert whole["options"][0]["fits"] and whole["options"][0]["required"] <= 80e9
    text = str(found)
    assert text.splitlines()[0] == "gpt:13b (12.9B parameters) on 64xA100, 300B tokens, adamw in mixed precision"
    assert "†" in text and "the price of the delay is assumed" in text
    assert "<table>" in found._repr_html_() and "27 options" in repr(found).replace(str(len(found)), "27")


def test_explanations_add_up(found):
    for title in ("sharded", "interleaved", "pipedream_2bw", "streaming"):
        one = next(one for one in found if one.title == title)
        text = one.explain()
        for part in ("F, forward", "seconds", "activations", "τ', effective delay", "small_tokens", "peak"):
            assert part in text, (title, part)
        took = one.step
        parts = (
            took.computing + took.recomputing + took.messages + took.reducing + took.optimizer + took.bubble
            + took.waiting
        )  # fmt: skip
        assert parts == pytest.approx(took.seconds, rel=0.02)
        assert "not confirmed" in text or title != "streaming"


def test_timelines(found):
    one = next(one for one in found if one.title == "interleaved")
    slots = one.timeline()
    assert max(slot.end for slot in slots) == pytest.approx(one.step.seconds)
    assert {slot.op.kind for slot in slots} == {"F", "B", "U"}


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zb_v"])
def test_a_worker_does_one_operation_at_a_time(name):
    """Whichever stages it has; the stage after the turn of a V is on the same worker, and needs no message."""
    asked = search(SMALL, "8xA100", methods=name, fixed=Fixed(stages=(4,), tensor=(1,), replicas=(2,)))
    one = next(one for one in asked if one.option.pipeline == 4)
    at = [one.option.technique.worker(s, 4) for s in range(one.option.stages)]
    assert at[:8] == ([0, 1, 2, 3, 3, 2, 1, 0] if name == "zb_v" else [0, 1, 2, 3, 0, 1, 2, 3])
    slots = one.timeline()
    assert max(slot.end for slot in slots) == pytest.approx(one.step.seconds)
    for w in range(4):
        mine = sorted(slot for slot in slots if at[slot.stage] == w)
        assert len(mine) == one.option.chunks * one.option.micro_batches * (3 if name == "zb_v" else 2) + 1
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(mine))


def test_the_frontier(found):
    points = found.frontier([32, 64, 128])
    assert [point.devices for point in points] == [32, 64, 128]
    assert points[1].best.days == pytest.approx(found.best.days)
    assert points[0].best.days > points[1].best.days > points[2].best.days


def test_how_many_devices_for_so_many_days():
    asking = question("gpt:13b", tokens=300e9, methods="one_f_one_b,pipedream_2bw")
    enough = within(asking, device("A100"), 20 * 86_400)
    assert enough.best.days <= 20
    fewer = asking.best(devices(f"{enough.job.cluster.count - 8}xA100"))
    assert fewer is None or fewer.best.days > 20 * 0.9
    with pytest.raises(ValueError, match=r"gpt:13b takes .* at least, on .*; give in="):
        within(asking, device("A100"), 3600)
    with pytest.raises(NothingFits, match="fits on no number of RTX4090; give devices= with more memory"):
        within(question("gpt:175b", methods="gpipe", fixed=Fixed(stages=(1,), tensor=(1,))), device("RTX4090"), 1e9)


@pytest.mark.parametrize("model, on, more, says", [
    ("gpt:13b", "8xA100", dict(fixed=Fixed(stages=(50,))), "stages=50 are more than the 40 layers of gpt:13b"),
    ("gpt:13b", "8xA100", dict(fixed=Fixed(tensor=(3,))), "tensor=3 does not divide heads=40 of gpt:13b; give"),
    ("gpt:13b", "8xA100", dict(fixed=Fixed(stages=(4,), tensor=(4,))), "stages=4 tensor=4 are 16 devices, but"),
    ("gpt:13b", "8xA100", dict(fixed=Fixed(batch=7, stages=(1,), tensor=(1,))), "no way to share 8xA100 out"),
    ("gpt:13b", "8xA100", dict(fixed=Fixed(stores=("disc",))), "there is no store 'disc'; did you mean 'disk'?"),
    ("gpt:13b", "8xA100", dict(methods="cerebras"), "method=cerebras is written for sgd; give optimizer=sgd"),
    ("gpt:13b", "8xA100", dict(optimizer="adamx"), "there is no optimizer 'adamx'; did you mean 'adam'?"),
    ("gpt:13b", "8xA100", dict(numbers="double"), "there is no precision 'double'"),
    ("gpt:13b", "8xA100", dict(tokens="many"), "tokens='many' is no number above 0"),
    ("gpt:13b", "8xA100", dict(tokens=-1), "tokens=-1 is no number above 0; write for example tokens=300B"),
    ("gpt:13b", "8xA100", dict(tokens=float("nan")), "tokens=nan is no number above 0"),
    ("gpt:13b", "8xA100", dict(tokens=float("inf")), "tokens=inf is no number above 0"),
    ("gpt:13b", "8xA100", dict(price=-2), "price=-2 is no cost; write a number of at least 0, for example price=2"),
    ("gpt:13b", "8xA100", dict(target=Loss), None),
])  # fmt: skip
def test_contradictions_are_named(model, on, more, says):
    if says is None:
        with pytest.raises(ValueError, match="critical_batch must be above 0, but is 0"):
            Loss(critical_batch=0)
        with pytest.raises(ValueError, match="slow of pb must be at least 0"):
            Loss(slow={"pb": -1})
        with pytest.raises(ValueError, match="there is no method 'pbb'; did you mean 'pb'"):
            Loss(slow={"pbb": 1})
        return
    with pytest.raises(ValueError) as found:
        search(model, on, **more)
    assert says in str(found.value)


def test_an_option_is_checked():
    job = question(SMALL, tokens=1e9).job(devices("4xA100"))
    plain = Option(technique("one_f_one_b"), pipeline=4)
    for more, says in (
        (dict(data=2), "are 8 devices, more than the 4 there are; give devices=8xA100"),
        (dict(chunks=4), "stages=16 are more than the 8 layers"),
        (dict(pipeline=1, tensor=3), "tensor=3 does not divide heads=16"),
        (dict(recompute="some"), "recompute='some' is unknown to an option, which has none, selective, full; give"),
        (dict(store="host"), "the planner streams through whole replicas; give stages=1"),
    ):
        with pytest.raises(ValueError) as found:
            estimate(job, replace(plain, **more))
        assert says in str(found.value)


@pytest.mark.parametrize(("model", "devices"), [("gpt:13b", "1xA100"), rare("gpt:175b", "8xA100")])
def test_what_fits_nowhere_says_what_does(model, devices):
    with pytest.raises(NothingFits) as found:
        search(model, devices)
    text = str(found.value)
    assert f"{model} does not fit on {devices}" in text and "A100 has 80.0 GB" in text
    assert found.value.required > 80e9
    cures = text.partition("What fits: ")[2].split(", ")
    assert len(cures) >= 2
    for cure in cures:  # as typed
        name, _, value = cure.partition("=")
        if name == "devices":
            assert search(model, value).best.fits
        else:
            assert search(model, devices, fixed=Fixed(stores=(value,))).best.fits


def test_refused_methods_say_what_they_need():
    found = search("gpt:1t", "1024xA100", methods="zb_h1,pipedream")
    assert [one.title for one in found.refused] == ["pipedream"] and not found.refused[0].fits
    assert any("pipedream does not fit: it needs at least" in note for note in found.notes)
