"""The decisions of streaming, seen by a driver that writes down what it is told."""

import pytest

from pipeback import methods
from pipeback.schedules.order import Wave
from pipeback.streaming.fetch_policy import FetchPolicy, asks, brings, together, units_ahead

FIVE = [Wave("F", [(s, 0) for s in range(3)]), Wave("B", [(2, 0)]), Wave("B", [(1, 0)])]


class Driver:
    """Stages 0, 1, … have weights, but for the `empty` one; what is told is `said`."""

    def __init__(self, prefetch, asked=False, needs_entry=False, empty=None, units=None):
        self.policy = FetchPolicy(self, prefetch, {"F": asked, "B": asked}, needs_entry)
        self.empty, self.said, self.here = empty, [], set()
        self.units = units or {}  # the first stage of the unit of a stage, where that is another one

    def unit(self, stage):
        return self.units.get(stage, stage)

    def size(self, unit):
        return max(1, list(self.units.values()).count(unit))

    def comes(self, stage):
        return stage != self.empty

    def lies(self, stage):
        return stage in self.here

    def found(self, stage):
        return f"{stage} is there"

    def fetch(self, stage, wave, asks):
        ops = " ".join(f"{wave.kind}{mb}" for _, mb in wave.ops)
        self.said.append(f"fetch {stage} for {ops}" if asks else f"fetch {stage}")
        self.here.add(stage)
        return self.said[-1]

    def end(self, fetch):
        self.said.append(f"end {fetch}")

    def admit(self, stage):
        self.said.append(f"admit {stage}")

    def dismiss(self, stage):
        self.said.append(f"dismiss {stage}")
        self.here.discard(stage)

    def run(self, waves=FIVE, ticks=False):
        for wave in self.policy.ahead(waves, ticks=ticks):
            self.said.append(" ".join(f"{wave.kind}{s}" for s, _ in wave.ops))
            unit = self.unit(wave.ops[0][0])
            if wave.kind != "U" and self.comes(unit):
                self.policy.use(unit, wave)
            elif wave.kind == "U":
                self.here.discard(unit)  # the newest weights are others now
        return self.said


def test_one_stage_at_a_time():
    assert Driver(0).run() == [
        "admit 0", "fetch 0", "F0", "dismiss 0", "admit 1", "fetch 1", "F1", "dismiss 1", "admit 2", "fetch 2", "F2",
        "B2", "dismiss 2", "admit 1", "fetch 1", "B1",
    ]  # fmt: skip


def test_one_ahead():
    driver = Driver(1)
    # stage 1 stays for its backward: at F2 the next visit is B1
    assert driver.run() == [
        "admit 0", "fetch 0", "admit 1", "fetch 1", "F0", "dismiss 0", "admit 2", "fetch 2", "F1", "F2", "B2", "B1",
    ]  # fmt: skip
    assert driver.policy.here == [1, 2] and driver.policy.peak_stages == 2


def test_a_stage_without_weights_takes_no_room():
    assert Driver(0, empty=1).run() == [
        "admit 0",
        "fetch 0",
        "F0",
        "F1",
        "dismiss 0",
        "admit 2",
        "fetch 2",
        "F2",
        "B2",
        "B1",
    ]


TICKS = [Wave(kind, [(s, 0) for s in range(4)]) for kind in ("F", "B", "U")]


def test_a_unit_does_its_operations_of_a_tick_at_one_visit():
    driver = Driver(1, units={1: 1, 2: 1, 3: 1})
    assert driver.run([*TICKS, *TICKS[:1]], ticks=True) == [
        "admit 0", "fetch 0", "admit 1", "fetch 1", "F0", "B0", "U0", "fetch 0", "F1 F2 F3", "B1 B2 B3", "U1 U2 U3",
        "fetch 1", "F0", "F1 F2 F3",
    ]  # fmt: skip
    assert driver.policy.peak_stages == 4


def test_one_unit_at_a_time():
    driver = Driver(0, units={1: 1, 2: 1, 3: 1})
    assert driver.run(TICKS[:2], ticks=True) == [
        "admit 0", "fetch 0", "F0", "B0", "dismiss 0", "admit 1", "fetch 1", "F1 F2 F3", "B1 B2 B3",
    ]  # fmt: skip
    assert driver.policy.peak_stages == 3


def test_units_have_half_of_the_room():
    assert [together(prefetch) for prefetch in (0, 1, 2, 3, 7, 10)] == [1, 1, 1, 2, 4, 5]
    assert [units_ahead(prefetch, [1, together(prefetch)]) for prefetch in (0, 1, 2, 3, 7, 10)] == [0, 1, 2, 1, 1, 1]
    assert units_ahead(7, [1, 3]) == 1 and units_ahead(7, []) == 7


def test_a_method_that_is_asked_chooses_for_every_operation():
    said = Driver(2, asked=True).run()
    # F2 and B2 are one visit, which begins by fetching what the next one is for
    assert [told for told in said if told.startswith("fetch")] == [
        "fetch 0 for F0", "fetch 1 for F0", "fetch 2 for F0", "fetch 1 for B0", "fetch 2 for B0",
    ]  # fmt: skip


def test_what_must_know_its_entry_is_not_asked_ahead():
    said = Driver(2, asked=True, needs_entry=True).run()
    assert [told for told in said if told[0] in "FBf"][:4] == ["F0", "fetch 0 for F0", "F1", "fetch 1 for F0"]


def test_what_nobody_came_to_use_is_waited_for():
    driver = Driver(0, asked=True)
    driver.policy.begin(0, Wave("F", [(0, 0)]))
    assert driver.policy.begin(0, Wave("F", [(0, 0)])) == "fetch 0 for F0"  # is on its way
    driver.policy.begin(0, Wave("F", [(0, 1)]))
    driver.policy.vacate()
    assert driver.said == [
        "admit 0",
        "fetch 0 for F0",
        "end fetch 0 for F0",
        "fetch 0 for F1",
        "end fetch 0 for F1",
        "dismiss 0",
    ]


@pytest.mark.parametrize(
    "choice, owned, found",
    [
        ("newest", False, (7, 7)),
        ("used", False, (5, 5)),
        ("used", True, (5, None)),
        ("shifted", False, (7, None)),
        (6, False, (6, 6)),
    ],
)
def test_what_a_choice_means(choice, owned, found):
    assert brings(choice, 7, 5, owned=owned) == found


def test_who_is_asked():
    found = {name: asks(methods.create(name)) for name in ("gpipe", "pb", "pipedream")}
    assert found["gpipe"] == found["pb"] == {"F": False, "B": False}
    assert found["pipedream"] == {"F": True, "B": True}
