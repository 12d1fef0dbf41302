"""How long training will wait for weights, by hand."""

from pipeback import methods
from pipeback.plan import drive
from pipeback.plan.dry_run import DryWorker, Load, Room
from pipeback.plan.forecast import foresee
from pipeback.plan.survey import survey
from pipeback.plan.training_plan import plan
from pipeback.runtime.loop import Loop
from pipeback.schedules.order import Order
from tests.laws.cases import network, pipeline
from tests.plan.planned import SAMPLES, pushed


def survey_of(pipe, x, y=None):
    pipe.plan(x, y)
    return survey(pipe._engine.holding, pipe._engine.setting, len(x))


def run_dry(prefetch, pushes, count=1, method=None, rest=True, **load):
    method = method or methods.create("gpipe")
    dry = DryWorker({0: Load(10, 4, 1, **load), 1: Load(10, 4, 1, **load)}, 2, prefetch)
    order = Order(method.schedule, 2, policy="streaming", near=max(1, prefetch))
    loop = Loop(dry, order, method, at_once=True)
    for _ in range(pushes):
        drive.push(loop, count)
    if rest:
        dry.rest()
    return dry


def test_waiting_by_hand_with_nothing_fetched_ahead():
    # fetching   W0 ─── ·  W1 ─── ·  ·  ·  W0 ───
    #            0    3    4    7          10   13
    # computing            F0       F1 B1─        B0─          (F takes 1, B takes 2)
    #                      3  4     7 8   10      13 15
    # updating                             U1 ────── U0 ────   10 to 14 and 15 to 19
    dry = run_dry(0, 1, forward=1, backward=2, fetch=3, update=4)
    assert (dry.number.stall, dry.number.seconds) == (3 + 3 + 3 + 4, 19)
    assert (dry.number.fetches, dry.number.weights_in, dry.number.gradients_out) == (3, 30, 8)
    assert dry.most == Room(weights=10, gradients=4, activations=2)


def test_waiting_by_hand_with_one_stage_fetched_ahead():
    # fetching   W0 ─── W1 ───            stage 0 stays where it is
    #            0    3      6
    # computing       F0     F1 B1─ B0─
    #                 3  4   6  7   9  11
    # updating                      U1 ──── U0 ────    9 to 13 to 17
    dry = run_dry(1, 1, forward=1, backward=2, fetch=3, update=4)
    assert (dry.number.stall, dry.number.seconds, dry.number.fetches) == (3 + 2 + 6, 17, 2)
    # the next push begins at 11: W0 17 to 20, when U0 is done; W1 to 23; F0 at 20, F1 at 23; and ends at 23 + 5
    again = run_dry(1, 2, rest=False, forward=1, backward=2, fetch=3, update=4)
    assert (again.now, again.number.fetches, again.number.stall) == (28, 4, 3 + 2 + 9 + 2)


def test_gradients_that_leave_and_are_added():
    # F0 F0 F1 F1 B1 B1 B0 B0: the second backward of each stage adds; U1 begins 5 after B1 is done, U0 5 after B0
    dry = run_dry(1, 1, 2, forward=1, backward=2, add=7, leave=5, update=1)
    assert dry.number.seconds == 4 + (4 + 7) + (4 + 7) + 5 + 1
    assert dry.number.stall == 6


def test_activations_that_do_not_stream_in_time():
    # F F B B, 4 micro-batches of 2 stages: 3 − 1 and 5 − 2 longer than computing each time
    dry = run_dry(1, 1, 2, forward=1, backward=2, away=3, back=5)
    assert (dry.number.seconds, dry.number.stall) == (4 * 3 + 4 * 5, 4 * 2 + 4 * 3)
    assert run_dry(1, 1, 2, forward=1, backward=2, away=1, back=2).number.stall == 0


def test_a_large_batch_hides_streaming(monkeypatch):
    monkeypatch.setattr("pipeback.plan.training_plan.WORK", 40_000)
    facts = survey_of(pipeline(network(), "gpipe", micro_batch_size=SAMPLES, store="host"), *pushed(2))
    costs = {"forward": 1.0, "backward": 1.0, "fetch": 20.0, "update": 1.0, "leave": 0.0, "ask": 0.0, "add": 0.0}
    slow = {s: p._replace(load=p.load._replace(**costs)) for s, p in facts.stages.items()}
    found = plan(facts._replace(stages=slow), 2)
    low, high = found.window
    assert high is None and found.push.share > 0.05
    shares = [foresee(found.facts, m).share for m in (1, low // 2, low, 4 * low)]
    assert shares == sorted(shares, reverse=True) and shares[1] > 0.05 >= shares[2]
