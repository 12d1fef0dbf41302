"""`pipeback plan` for models that are not built: the table, files, explanations, windows, calibration, validation."""

import json
import re

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from tests.recipes.cli import pipeback

GPT = ["gpt:125m", "devices=8xA100", "tokens=1B", "method=gpipe,one_f_one_b,pb,zb_h1", "micro_batch=4,8"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan with all its files, and their folder."""
    folder = tmp_path_factory.mktemp("planned")
    done = pipeback("plan", *GPT, "out=plan.html,plan.png", "json=plan.json", "price=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, folder


def test_the_table(planned):
    done, _ = planned
    assert "gpt:125m (126M parameters) on 8xA100, 1.00B tokens, adamw in mixed precision" in done.stdout
    first = re.search(r"^ +1†? .*", done.stdout, re.MULTILINE)[0]
    assert "data parallel" in first or "sharded" in first
    assert "† the price of the delay is assumed" in done.stdout
    assert "written: plan.html" in done.stdout
    assert "cost" in done.stdout and "device-" in done.stdout


def test_one_device_and_its_price(tmp_path):
    done = pipeback("plan", "gpt:125m", "devices=1xA100", "tokens=1B", "price=2", "top=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"one device +1 × 1 × 1 .* 0\.147 +7\.0\d ", done.stdout), done.stdout


def test_endings_in_capitals_and_a_name_within_another(tmp_path):
    """plan.html is a part of plan.html.JSON, and is no file of json=."""
    words = ["gpt:125m", "devices=8xA100", "tokens=1B", "out=plan.html", "json=plan.html.JSON"]
    done = pipeback("plan", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.html.JSON").read_text("utf-8"))
    assert (tmp_path / "plan.html").read_text("utf-8").startswith("<!")


def test_the_data(planned):
    content = json.loads((planned[1] / "plan.json").read_text())
    assert content["model"] == "gpt:125m" and content["options"][0]["binds"]
    days = [option["days"] for option in content["options"]]
    assert days == sorted(days) and all(option["fits"] for option in content["options"])
    assert content["options"][0]["cost"] == pytest.approx(content["options"][0]["device_days"] * 48)


def test_the_page_is_one_file_with_everything(planned):
    page = (planned[1] / "plan.html").read_text()
    for head in ("Options", "Memory", "Where the time goes", "A step", "Devices and days",
                 "Streaming: the batch window", "When never flushing pays", "The best option, number by number",
                 "How this was made"):  # fmt: skip
        assert f"<h2>{head}</h2>" in page, head
    assert not re.search(r'(?:src|href|srcset)="(?!data:)', page)  # nothing is fetched
    assert page.count("<svg") > 10 and page.count("data:image/png;base64,") == 4
    assert "pipeback plan gpt:125m devices=8xA100" in page
    assert "undefined" not in page.lower() and "nan" not in re.findall(r"<td>(.*?)</td>", page)


def test_the_picture(planned):
    content = (planned[1] / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 30_000


def test_an_explanation(tmp_path):
    done = pipeback("plan", *GPT, "--explain", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("option 2 of gpt:125m") and "2s(2h² + 2h²·kv/a + n·h·f)" in done.stdout
    assert "constants" in done.stdout and "days to the target" in done.stdout


def test_how_many_devices(tmp_path):
    done = pipeback("plan", "gpt:125m", "devices=A100", "tokens=1B", "in=2h", "method=gpipe", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"on \d+xA100", done.stdout)


def test_a_model_by_numbers_with_a_store(tmp_path):
    words = ["gpt:layers=4,width=512,heads=8", "devices=2xH100", "link=50GB/s", "host=1TB", "store=host,disk"]
    done = pipeback("plan", *words, "batch=64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "streaming" in done.stdout and "host" in done.stdout


def test_windows(tmp_path):
    done = pipeback("plan", "window", "gpt:13b", "devices=H100,CS-2,CS-2-75PF", "out=w.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the window is open") == 2 and done.stdout.count("the window is empty") == 1
    assert (tmp_path / "w.png").stat().st_size > 10_000


def test_calibration_is_planned_with(tmp_path):
    words = ["data.samples=96", "model.depth=4", "updates=96", "most=2", "method=pb", "out=slow.json"]
    done = pipeback("plan", "calibrate", "experiment=digits", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "slow.json").read_text())
    assert [run["delay"] for run in written["runs"]] == [4, 8] and written["slow"]["pb"] >= 0
    assert "slow = 1 +" in done.stdout
    plan = ["gpt:125m", "devices=8xA100", "tokens=1B", "method=pb", "stages=4", "calibrate=slow.json", "json=p.json"]
    done = pipeback("plan", *plan, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    slow = json.loads((tmp_path / "p.json").read_text())["options"][0]["slow"]
    assert slow["known"] == "calibrated" and slow["kappa"] == written["slow"]["pb"]


def test_published_measurements(tmp_path):
    done = pipeback("plan", "validate", "bubbles", "memory", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```shell\npipeback plan validate bubbles memory\n```\n\nMeasured on ")
    short = done.stdout.partition("### In short")[2]
    assert short.count("| yes |") == 3 and "| no" not in short


def test_real_pipelines_of_any_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeback.methods.available", lambda: ["pb", "interleaved", "zb_h1", "eigendelay"])
    done = pipeback("plan", "validate", "pipelines", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^\| `(\w+)`.* ([\d,]+) \| +([\d,]+) \|$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in shown] == ["pb", "interleaved", "eigendelay"]
    assert all(measured == planned for _, measured, planned in shown)


def test_runs_of_ones_own(tmp_path):
    own = tmp_path / "mine.csv"
    own.write_text(
        "name,layers,width,heads,context,devices,tensor,pipeline,chunks,micro_batch,batch,recompute,seconds,network\n"
        "mine,24,1024,16,1024,8,1,2,1,4,64,full,0.5,25\n"
    )
    done = pipeback("plan", "validate", "steps", "rows=mine.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine, 4 × 2 × 1, 4 × 4 of 1024, recompute=full" in done.stdout


def test_a_device_that_is_not_here(tmp_path):
    words = ["stages=4", "width=64", "micro_batches=4", "samples=2", "store=host", "device=H100"]
    done = pipeback("plan", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "assumed on H100" in done.stdout and "at 46.6 GiB/s" in done.stdout


@pytest.mark.parametrize("words, text", [
    (["gpt:13b"], "gpt:13b: on which devices? Add for example devices=64xA100"),
    (["gpt:13b", "devices=64xA10"], "there is no device 'A10'; did you mean 'A100'?"),
    (["gtp:13b", "devices=8xA100"], "there is no family of models 'gtp'; did you mean 'gpt'?"),
    (["gpt:13b", "devices=8xA100", "method=pipedraem"], "there is no method 'pipedraem'; did you mean 'pipedream'?"),
    (["gpt:13b", "devices=8xA100", "methd=pb"], "'methd=pb' is not an option; did you mean 'method'?"),
    (["gpt:13b", "gpt:22b", "devices=8xA100"], "two models, gpt:13b and gpt:22b; plan one at a time"),
    (["gpt:13b", "devices=8xA100", "stages=41"], "stages=41 are more than the 40 layers of gpt:13b; give stages=40"),
    (["gpt:layers=4,width=100,heads=3", "devices=8xA100"], "heads=3 do not divide width=100"),
    (["gpt:13b", "devices=1xA100"], "gpt:13b does not fit on 1xA100"),
    (["gpt:13b", "devices=8xA100", "in=soon"], "in='soon' is no time; write for example in=30d"),
    (["gpt:13b", "devices=8xA100", "out=plan.doc"], "out=plan.doc must end in one of .html, .png"),
    (["gpt:13b", "devices=8xA100", "out=plan.json"], "out=plan.json must end in one of .html, .png"),
    (["gpt:13b", "devices=8xA100", "json=plan.html"], "json=plan.html must end in one of .json"),
    (["gpt:13b", "devices=8xA100", "out=nowhere/plan.png"], "there is no folder nowhere"),
    (["gpt:13b", "devices=8xA100", "calibrate=none.json"], "calibrate=none.json is no file of `pipeback plan"),
    (["gpt:125m", "devices=8xA100", "explain=99"], "explain=99, but there are"),
    (["gpt:13b", "devices=8xA100", "price=-5"], "price='-5' is no cost; write a number of at least 0, for example"),
    (["gpt:13b", "devices=64xA100", "link=0GB/s"], "link='0GB/s' is no speed above 0; write bytes a second"),
    (["gpt:13b", "--explain"], "--explain needs a value; write --explain=..."),
    (["window", "gpt:13b"], "name one model and its devices: pipeback plan window gpt:13b devices=H100,GH200"),
    (["window", "gpt:13b", "device=H100"], "'device=H100' is not an option of window; did you mean 'devices'?"),
    (["window", "gpt:13b", "devices=H100", "out=w.html"], "out=w.html must end in one of .eps"),
    (["window", "gpt:13b", "devices=H100", "out=nowhere/w.png"], "there is no folder nowhere; make it first"),
    (["calibrate", "method=gpipe"], "method=gpipe has no delay per micro-batch; give flowing ones, method=pb"),
    (["validate", "bubble"], "'bubble' is no section; there are bubbles, steps, memory"),
    (["fit", "row=3"], "'row' is no option of fit; there are rows=, table= and crossed=true"),
    (["fit", "rows=none.csv"], "rows=none.csv: No such file or directory; give a CSV file of measured runs"),
    (["validate", "steps", "rows=none.csv"], "rows=none.csv: No such file or directory"),
    (["stages=4", "width=16", "device=H100", "run=2"], "run= trains here, and device= is not here"),
    (["stages=4", "width=16", "device=H10"], "there is no device 'H10'; did you mean 'H100'?"),
])  # fmt: skip
def test_mistakes_are_one_line(words, text, tmp_path):
    done = pipeback("plan", *words, cwd=tmp_path)
    assert done.returncode and text in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
