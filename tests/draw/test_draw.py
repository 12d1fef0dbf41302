"""Grids, pictures and the trace of a real run."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import matplotlib
import pytest

import pipeback
from pipeback import draw
from pipeback.draw import perfetto as traces
from pipeback.draw.worker_bands import beside
from pipeback.recipes import draw as command
from pipeback.schedules.ops import Op
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.recording import Recording, Track
from pipeback.schedules.timeline import UNIT, bubble, timeline
from tests.helpers.tracing import check_events
from tests.laws.cases import CASES, STAGES, data, network, pipeline, weights

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.text import Text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_has_a_box_an_operation(ending, tmp_path):
    ax = draw.picture(timeline(flowing(2), 4, 8), title="PB")
    assert len(ax.patches) == 2 * 4 * 8
    assert {text.get_text() for text in ax.texts} == {str(i) for i in range(8)}
    ax.figure.savefig(tmp_path / f"pb.{ending}")
    assert (tmp_path / f"pb.{ending}").stat().st_size > 3000
    plt.close("all")


def test_schedules_on_one_axis(tmp_path):
    figure = draw.compare({"GPipe": fill_drain(4), "PB": flowing(2)}, 4, 20, until=30)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[0].startswith("GPipe") and titles[1].startswith("PB")
    plt.close("all")


@pytest.mark.parametrize(("stages", "until", "idle"), [(4, 1, 75), (4, 2, 62), (4, 3, 50), (4, 4, 38), (8, 5, 62)])
def test_stages_that_have_not_begun_are_idle(stages, until, idle):
    """By hand: pb begins a stage a unit of time, and the last does F and B in turns."""
    figure = draw.compare({"pb": flowing(2)}, stages, 8, until=until)
    assert figure.axes[0].get_title("left") == f"pb   (idle in what is shown: {idle}%)"
    plt.close("all")


@pytest.mark.parametrize("first", [["pb"], ["trace=run.json"]], ids=["schedule", "trace"])
def test_the_command_writes_several_files(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    traces.write(recorded(flowing(2), 2, 3, UNIT, [0, 1]), "run.json")
    command.show(command.parsed([*first, "out=one.png,two.SVG"]))
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "one.png", "two.SVG"}
    assert Path("one.png").read_bytes().startswith(b"\x89PNG") and b"<svg" in Path("two.SVG").read_bytes()
    plt.close("all")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    pipe = pipeline(network(2), "pb")
    with pytest.raises(ModuleNotFoundError, match=r"^pictures need matplotlib: pip install 'pipeback\[recipes\]'$"):
        pipe.draw()


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.picture([])
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    with pytest.raises(ValueError, match=r"call pipe.record\(\) before the pushes"):
        draw.measured(pipe)


@pytest.mark.parametrize("workers", [None, 2])
def test_the_trace_of_a_real_run(workers, tmp_path):
    """Every operation of the run is in it once, with its time, in the row of its stage, in an order data allows."""
    silent, pipe = (pipeline(network(), CASES["cerebras"](STAGES), workers=w) for w in (None, workers))
    pipe.record()
    for x, y in data(12):
        silent.push(x, y)
        pipe.push(x, y)
    silent.drain()
    pipe.drain()
    assert (weights(silent) == weights(pipe)).all()  # measuring changes no bit
    written = draw.trace(pipe, tmp_path / "run.json", "cerebras")
    assert json.loads((tmp_path / "run.json").read_text()) == written
    recording = draw.measured(pipe)
    assert sorted((s.stage, s.op) for s in recording) == sorted(
        (s.stage, s.op) for s in timeline(pipe.method.schedule, STAGES, 12)
    )
    assert recording[0].op == Op("F", 0) and recording[0].start == 0 and recording.micro_batches() == 12
    check_events(written, pipe.owner)
    pipe.close()


def test_a_trace_is_read_again(tmp_path):
    pipe = pipeline(network(), "gpipe", workers=2)
    pipe.record()
    pipe.push(*data(1)[0])
    pipe.drain()
    draw.trace(pipe, tmp_path / "run.json", "a flush")
    once, again = draw.measured(pipe), traces.read(tmp_path / "run.json")
    assert (again.name, again.owner, again.micro_batches()) == ("a flush", pipe.owner, 1)
    assert [t.name for t in again.tracks] == ["worker 0", "worker 1"] == [t.name for t in once.tracks]
    assert [(s.stage, s.op) for s in again] == [(s.stage, s.op) for s in once]
    assert again.idle().share == pytest.approx(once.idle().share, abs=1e-3)
    pipe.close()
    for text in ("no JSON", "{}", '{"traceEvents": [], "otherData": {}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="other.json is not a trace that pipeback wrote"):
            traces.read(tmp_path / "other.json")


def recorded(schedule, stages, micro_batches, costs, owner, delay=0):
    """What a run would record in which every operation takes its time; each worker is `delay` later than the last."""
    tracks = [Track(f"rank {w}", w, 0, []) for w in range(max(owner) + 1)]
    for slot in timeline(schedule, stages, micro_batches, costs, owner):
        late = delay * owner[slot.stage]
        tracks[owner[slot.stage]].slots.append(slot._replace(start=slot.start + late, end=slot.end + late))
    return Recording(tracks, owner)


@pytest.mark.parametrize("schedule", [fill_drain, one_f_one_b])
@pytest.mark.parametrize(("workers", "each", "m"), [(2, 4, 8), (3, 2, 5), (4, 1, 4)])
def test_the_bubble_of_a_flush_in_closed_form(schedule, workers, each, m):
    """(W − 1)/(M + W − 1) on W workers, however many stages each has, and flush after flush."""
    owner = [s // each for s in range(workers * each)]
    unit = {"F": Fraction(1), "B": Fraction(1), "U": Fraction(0)}
    for flushes in (1, 3):
        recording = recorded(schedule(m), len(owner), flushes * m, unit, owner)
        wanted = (workers - 1) / (m + workers - 1)
        assert recording.idle().share == pytest.approx(wanted, abs=1e-12)
        assert recording.predicted().idle().share == pytest.approx(wanted, abs=1e-12)
        assert bubble(recording, owner) == pytest.approx(wanted, abs=1e-12)
        assert all(share == pytest.approx(wanted, abs=1e-12) for share in recording.idle().each)


def test_fill_and_drain_stand_apart():
    recording = recorded(flowing(2), 2, 3, UNIT, [0, 1])
    # 0 │ F0 F1 F2 B0 .  B1 .  B2
    # 1 │ .  F0 B0 F1 B1 F2 B2 .
    assert recording.gaps() == [[(4, 5), (6, 7)], [(0, 1), (7, 8)]]
    assert recording.idle() == (4 / 16, [2 / 8, 2 / 8], 2 / 12, 8)
    assert recorded(fill_drain(3), 2, 6, UNIT, [0, 1]).idle().steady == (4 + 2) / 28
    assert recorded(flowing(0), 1, 3, UNIT, [0]).idle() == (0, [0], 0, 6)


def test_the_prediction_is_of_what_was_recorded():
    """Costs are those that were measured, a stage at a time; a recording may begin with micro-batches in flight."""
    costs = [{"F": 1.0 + s, "B": 3.0, "U": 0.5} for s in range(4)]
    owner = [0, 0, 1, 1]
    recording = recorded(flowing(2), 4, 30, costs, owner)
    for a, b in zip(recording.costs(), costs, strict=True):
        assert a == pytest.approx(b)
    for same in (recording.predicted(), recording.in_order()):
        assert [(s.stage, s.op) for s in same] == [(s.stage, s.op) for s in recording]
        assert [s.end for s in same] == pytest.approx([s.end for s in recording])
    late = recorded(flowing(2), 4, 30, costs, owner, delay=50.0)
    assert late.idle().share > late.in_order().idle().share == pytest.approx(recording.idle().share)
    middle = Recording([t._replace(slots=t.slots[40:]) for t in recording.tracks], owner)
    assert len(middle.predicted()) == len(middle) == len(middle.in_order())
    assert middle.predicted().idle().span <= middle.idle().span


def test_what_was_measured_as_text_and_picture(tmp_path):
    recording = recorded(fill_drain(8), 8, 16, UNIT, [s // 4 for s in range(8)])
    recording.name = "gpipe"
    first, head, *rows = draw.summary(recording).splitlines()
    assert first.startswith("gpipe: 8 stages on 2 workers, 16 micro-batches, 144000.0 ms; the clocks agree within 0 µs")
    assert head.split()[-4:] == ["rank", "0", "rank", "1"]
    assert [row.split()[-4:] for row in rows] == [["11.1", "8.8", "11.1", "11.1"]] * 4
    figure = beside([recording, recording])
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:2] == ["gpipe: measured", "gpipe: predicted by the schedule at these costs"] and len(titles) == 4
    assert figure.axes[0].get_title(loc="right") == "idle 11.1%, between fill and drain 8.8%"
    assert figure.axes[0].get_yticklabels()[1].get_text() == "rank 1\nstages 4 to 7\nidle 11.1%"
    figure.savefig(tmp_path / "run.png")
    plt.close("all")
    with pytest.raises(ValueError, match="nothing was recorded"):
        beside([Recording([Track("worker 0", 0, 0, [])], [0])])


def test_a_window_of_the_steady_state_is_measured_and_predicted():
    """By hand: of each flush of GPipe, 72 units long, each of two workers idles for 8."""
    recording = recorded(fill_drain(8), 8, 32, UNIT, [s // 4 for s in range(8)])
    part = recording.window(8, 24)
    assert part.idle().span == 2 * 72 and part.idle().share == pytest.approx(2 * 8 / 144)
    assert part[0].op.mb == 8 and part[0].stage == 0 and part[0].start == 0
    assert {slot.op.mb for slot in part} == set(range(8, 24))
    middle = recording.window(9, 11)  # operations across its ends are cut
    assert middle.idle().span == 2 * 4 and all(0 <= slot.start < slot.end <= 8 for slot in middle)
    figure = draw.beside([recording, recording], window=16)
    assert figure.axes[0].get_title(loc="right") == "idle 11.1%, 9000.0 ms per micro-batch"
    assert figure.axes[-1].get_xlabel() == "milliseconds of a run in its steady state, 16 micro-batches long"
    assert figure.axes[0].get_xlim() == (0, 144_000)
    plt.close("all")
    for first, last in ((-1, 4), (4, 4), (8, 32)):
        with pytest.raises(ValueError, match=r"does not lie in a run of 32; write for example window\(8, 16\)"):
            recording.window(first, last)
    with pytest.raises(ValueError, match="window=17: the steady state .* at most its middle half; write window=8,"):
        beside([recording], window=17)
    beside([recording], window=8)
    plt.close("all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pb", "window=4"], "window= is for a measured run; add --run or trace="),
        (["pb", "--run", "window=5"], "add micro_batches=20"),
        (["pb", "--run", "store=host", "window=4"], "window= does not go with store="),
        (["method=pd", "--run"], "unknown method 'pd'; did you mean 'pb'?"),
        (["pb", "--run", "--ranks", "5"], "ranks=5 is more than stages=4; every rank needs a stage"),
        (["pb", "--run", "missing/run.json"], "run=missing/run.json: there is no folder missing"),
        (["pb", "--run", "."], "run=. is a folder; name a file"),
        (["pb", "--run", "locked.json"], "run=locked.json cannot be written"),
        (["pb", "--run", "out=run.bmp"], "out=run.bmp must end in one of"),
        (["pb", "--run", "out=run.png,run.bmp"], "out=run.bmp must end in one of"),
        (["pb", "ranks=2"], "ranks= is for a real run; add --run"),
        (["pb", "--run", "ranks=0"], "ranks must be a whole number of at least 1"),
        (["pb", "--stages"], "--stages needs a value"),
        (["pb", "stagess=3"], "did you mean 'stages'?"),
        (["method=pipedream_2bw:micro_batches=2", "--run"], "micro_batches=2 is too few for 4 stages"),
        (["trace=nothing.json"], "No such file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(arguments, message, tmp_path, monkeypatch):
    recipe = pytest.importorskip("pipeback.recipes.draw")
    monkeypatch.chdir(tmp_path)
    Path("locked.json").touch()
    access = lambda path, mode: path.name != "locked.json"  # noqa: E731  # root may write anywhere
    monkeypatch.setattr("pipeback.recipes.output_files.os.access", access)
    monkeypatch.setattr(recipe, "run", lambda *_: pytest.fail("it was trained"))
    monkeypatch.setattr(sys, "argv", ["pipeback draw", *arguments])
    with pytest.raises(SystemExit) as stopped:
        recipe.main()
    assert message in str(stopped.value) and str(stopped.value).startswith("pipeback draw: ")


def test_options_may_be_written_in_three_ways():
    recipe = pytest.importorskip("pipeback.recipes.draw")
    other = ["--method", "gpipe,pb", "--stages", "8", "--micro-batches=24", "--run", "--out", "run.png"]
    wanted = recipe.parsed(["method=gpipe,pb", "stages=8", "micro_batches=24", "run=run.json", "out=run.png"])
    assert recipe.parsed(other) == wanted
    assert recipe.parsed(["pb", "--run", "window=5", "micro_batches=20"])["window"] == 5  # as a message names it
    assert wanted["ranks"] == 2 and recipe.parsed(["pb", "--run", "stages=1"])["ranks"] == 1


def test_workers_of_several_parts_in_text_and_pictures(capsys, tmp_path):
    """The command draws one row per stage and counts idle times per worker; a run names the stages of each."""
    command.show(command.parsed(["method=interleaved,one_f_one_b", "stages=4", "micro_batches=4", "flush=4"]))
    told = capsys.readouterr().out
    assert "interleaved: delays [0, 0, 0, 0], idle 11.1% over 4 micro-batches, workers of stages [0, 1, 0, 1]" in told
    assert "0 │ F0 F1 .  .  F2 .  F3 .  .  B0 .  B1 .  .  .  .  B2 B3" in told
    with pytest.raises(ValueError, match="stages=5 are no multiple of the 2 that each worker holds; write stages=6$"):
        command.show(command.parsed(["method=looped_bfs", "stages=5"]))
    command.show(command.parsed(["method=looped_bfs", "stages=6", f"out={tmp_path / 'bfs.png'}"]))
    assert (tmp_path / "bfs.png").stat().st_size > 3000
    pipe = pipeline(network(4), "interleaved", micro_batch_size=1, workers=2)
    pipe.record()
    pipe.push(*data(1, samples=4)[0])
    written = draw.trace(pipe, tmp_path / "run.json")
    names = [event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"]
    assert [name.rpartition(": ")[2] for name in names] == ["stages 0, 2", "stages 1, 3"]
    check_events(written, pipe.owner)
    pipe.close()
    plt.close("all")


@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "looped_bfs", "interleaved", "zb_h1", "zb_h2", "zb_v", "pipedream_2bw"]
)
def test_the_command_draws_flushes_of_as_many_micro_batches_as_are_asked_for(name):
    method = command.build(name, 8)
    assert method.micro_batches == 8 and command.build(f"{name}:micro_batches=4", 8).micro_batches == 4
    chunks = method.chunks if method.by_worker else 1
    schedule = command.scheduled(name, method, 4 * chunks)
    costs = {"F": 2, "B": 4, "I": 2, "W": 2, "U": 0}
    costs = {kind: time // chunks for kind, time in costs.items()}
    begins = [s.start for s in timeline(schedule, 4 * chunks, 64, costs) if s.stage == 0 and s.op.kind == "F"]
    idle = 1 - 8 * 6 / (begins[48] - begins[40])
    table = Path(__file__).parents[2] / "docs/how-to/bubbles.md"
    told = [line.split("|")[3] for line in table.read_text().splitlines() if line.startswith(f"| `{name}` ")]
    assert f" {idle:.0%} ".replace("%", " %") == (told[0] if told else " 0 % ")


def test_a_flush_that_is_too_small_is_said_before_anything_is_drawn(capsys, tmp_path):
    given = ["method=gpipe,pipedream_2bw", "stages=8", "micro_batches=12", "flush=6", f"out={tmp_path / 'a.png'}"]
    with pytest.raises(ValueError, match="pipedream_2bw: flush=6 is too few for 8 stages; add flush=8$"):
        command.show(command.parsed(given))
    assert not capsys.readouterr().out
    command.show(command.parsed([*given, "flush=8"]))
    assert (tmp_path / "a.png").is_file()
    with pytest.raises(ValueError, match="micro_batches=3 is too few for 8 stages"):  # which is not flush='s
        command.show(command.parsed(["method=pipedream_2bw:micro_batches=3", "stages=8"]))


def test_a_picture_ends_where_the_run_does():
    whole, beyond = (draw.compare({"GPipe": fill_drain(4)}, 3, 4, until=until) for until in (None, 300))
    (ax,), (other,) = whole.axes, beyond.axes
    assert ax.get_xlim() == other.get_xlim() and ax.get_title("left") == other.get_title("left")
    assert whole.get_size_inches().tolist() == beyond.get_size_inches().tolist()
    assert draw.compare({"GPipe": fill_drain(4)}, 3, 4, until=5).axes[0].get_xlim()[1] < ax.get_xlim()[1]


def test_methods_that_do_not_flush_are_drawn_as_they_are():
    assert command.build("pb", 8).schedule == pipeback.methods.create("pb").schedule
    assert command.build("pipemare", 8).micro_batches == 1


@pytest.mark.parametrize(("name", "stages"), [("one_f_one_b", 1), ("one_f_one_b", 2), ("zb_h1", 2)])
def test_the_title_of_a_small_picture_does_not_touch_its_legend(name, stages):
    method = pipeback.methods.create(name, micro_batches=2)
    figure = draw.compare({name: method.schedule}, stages, 2)
    figure.canvas.draw()
    (ax,) = figure.axes
    (title,) = [text for text in ax.findobj(Text) if text.get_text().startswith(name)]
    assert title.get_window_extent().x1 < ax.get_legend().get_window_extent().x0
    plt.close(figure)
