"""The dashboard, built offline: sections, panels, axes, grouping; and what saving it does, with and without a login."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

pytest.importorskip("hydra")

from pipeback.recipes import dashboard

wandb = pytest.importorskip("wandb")
ws = pytest.importorskip("wandb_workspaces.workspaces")
wr = pytest.importorskip("wandb_workspaces.reports.v2")

AXES = ["samples_seen", "trainer/global_step", "wall_time"]


def command(*arguments, cwd):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["pipeback dashboard", *arguments])
        try:
            dashboard.main()
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def configs(panels):
    return [panel["config"] for panel in panels]


def check_panels(by_section, metric):
    assert list(by_section) == [
        "Held out", "At the end", "Training loss", "Throughput and memory", "Staleness", "Configuration"
    ]  # fmt: skip
    for section, column in (("Held out", metric), ("Training loss", "train/loss")):
        assert [c["xAxis"] for c in configs(by_section[section])] == AXES
        assert all(c["metrics"] == [column] for c in configs(by_section[section]))
    assert [c["metrics"] for c in configs(by_section["At the end"])] == [[metric], ["val/loss"]]
    monitored = [c["metrics"][0] for name in ("Throughput and memory", "Staleness") for c in configs(by_section[name])]
    assert all(name.startswith("pipeback/") for name in monitored) and len(set(monitored)) == 9
    for section, panels in by_section.items():
        for config in configs(panels) if section != "Configuration" else []:
            assert (config["groupBy"], config["groupAgg"], config["groupArea"]) == ("method.value", "mean", "stddev")
    assert [panel["viewType"] for panel in by_section["Configuration"]] == ["Run Comparer"]


def test_workspace_is_written_without_a_login(tmp_path):
    code, said, complained = command("entity=me", "group=digits", "out=sub/board.json", cwd=tmp_path)
    assert code == 0, complained
    assert said.startswith("sub/board.json: the workspace")
    view = json.loads((tmp_path / "sub" / "board.json").read_text())
    assert (view["entity"], view["project"]) == ("me", "pipeback")
    assert view["displayName"] == "pipeback: methods compared on digits"
    section = view["spec"]["section"]
    check_panels({s["name"]: s["panels"] for s in section["panelBankConfig"]["sections"]}, "val/accuracy")
    (runs,) = section["runSets"]
    assert [(key["section"], key["name"]) for key in runs["grouping"]] == [("config", "method.value")]
    (only,) = runs["filters"]["filters"]
    assert (only["key"], only["op"], only["value"]) == ({"section": "run", "name": "group"}, "=", "digits")
    assert section["settings"]["maxRuns"] == 100


def test_report_is_written_without_a_login(tmp_path):
    options = ("kind=report", "metric=val/perplexity", "title=Characters", "out=board.json")
    code, _, complained = command(*options, cwd=tmp_path)
    assert code == 0, complained
    view = json.loads((tmp_path / "board.json").read_text())
    assert view["displayName"] == "Characters"
    names, grids = [], []
    for block in view["spec"]["blocks"]:
        if block["type"] == "heading":
            names.append(block["children"][0]["text"])
        elif block["type"] == "panel-grid":
            grids.append(block["metadata"])
    panels = [grid["panelBankSectionConfig"]["panels"] for grid in grids]
    check_panels(dict(zip(names, panels, strict=True)), "val/perplexity")
    assert all(panel["config"]["yLogScale"] for panel in panels[0])
    for grid in panels:  # none over another
        places = [(panel["layout"]["x"], panel["layout"]["y"]) for panel in grid]
        assert len(set(places)) == len(places)
    for grid in grids:
        (runs,) = grid["runSets"]
        assert [key["name"] for key in runs["grouping"]] == ["method.value"] and runs["filters"]["filters"] == []


@pytest.mark.parametrize("kind", ["workspace", "report"])
def test_without_out_it_is_saved(kind, tmp_path, monkeypatch):
    """As whoever is logged in; what is sent is what `out` would hold."""
    saved = []

    def save(thing):
        saved.append(thing)
        return thing

    class Api:
        default_entity = "someone"

    monkeypatch.setattr(wandb, "Api", Api)
    of = ws.Workspace if kind == "workspace" else wr.Report
    monkeypatch.setattr(of, "save", save)
    monkeypatch.setattr(of, "url", "https://wandb.ai/there")
    code, said, complained = command(f"kind={kind}", "group=digits", cwd=tmp_path)
    assert (code, said) == (0, "https://wandb.ai/there\n"), complained
    assert saved[0].entity == "someone" and saved[0].project == "pipeback"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kind=rport"], "kind must be workspace or report, but is 'rport'"),
        (["grup=digits"], "did you mean 'group'?"),
        ([], "the workspace cannot be saved to W&B: No API key configured"),
        (["kind=report"], "or write it to a file with out=dashboard.json"),
    ],
)  # fmt: skip
def test_bad_input_reads_well(arguments, message, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # where `wandb login` keeps the key
    monkeypatch.setattr(wandb, "Api", logged_out)
    code, _, complained = command(*arguments, cwd=tmp_path)
    assert code == 2 and message in complained and "Traceback" not in complained
    assert list(tmp_path.iterdir()) == []


def logged_out():
    raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")


def test_without_the_extra_the_cure_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    code, _, complained = command("out=board.json", cwd=tmp_path)
    assert code == 2 and "pip install 'pipeback[wandb]'" in complained


def test_the_one_private_name_is_still_there():
    """wandb-workspaces shows a specification only so; a release that renames it should be noticed here."""
    assert callable(ws.Workspace._to_model) and callable(wr.Report._to_model)


def test_help_tells_the_options(tmp_path):
    code, said, _ = command("--help", cwd=tmp_path)
    assert code == 0 and "metric=val/accuracy" in said and "kind=report" in said
