"""Shows the comparison of `pipeback report` as a dashboard on Weights & Biases: a workspace, or a report to share.

    pipeback dashboard entity=me project=pipeback group=digits
    pipeback dashboard group=shakespeare metric=val/perplexity kind=report
    pipeback dashboard group=digits out=dashboard.json       # no login: the specification alone

It needs wandb-workspaces: pip install 'pipeback[wandb]'. Runs are grouped by method; an empty panel fills as runs come
in. What W&B has no panels for (stage by step, time to target) is in `pipeback report wandb:entity/project/group`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pipeback.recipes.command import mistakes, plain, quoted, raising
from pipeback.recipes.usage import usage

AXES = {
    "samples_seen": "samples seen",
    "trainer/global_step": "steps (batches)",
    "wall_time": "seconds of training",
}
FIRST_STAGE = {  # panels of the first stage, which is the stalest; all stages of ten methods would be unreadable
    "pipeback/gap/stage_00": "gap ‖w now − w used‖, stage 0",
    "pipeback/delay/stage_00": "delay in updates, stage 0",
    "pipeback/update_norm/stage_00": "norm of an update, stage 0",
    "pipeback/clip_share/stage_00": "share of clipped updates, stage 0",
}
COST = {
    "pipeback/throughput": "samples per second",
    "pipeback/utilisation": "utilisation",
    "pipeback/weight_copies": "weight copies",
    "pipeback/state_copies": "method state, in copies of the weights",
    "pipeback/activation_mb": "activations in flight, MB",
}
KINDS = ("workspace", "report")


def sections(metric: str) -> dict[str, list[Any]]:
    """Return title -> panels. Lines are means over the runs of a method, areas one standard deviation."""
    import wandb_workspaces.reports.v2 as wr

    together: dict[str, Any] = {
        "groupby": wr.Config("method"),
        "groupby_aggfunc": "mean",
        "groupby_rangefunc": "stddev",
    }

    def curve(y: str, x: str, title: str, **more: Any) -> Any:
        return wr.LinePlot(title=title, x=x, y=[y], title_x=AXES[x], max_runs_to_show=100, **together, **more)

    def bars(column: str, title: str) -> Any:
        return wr.BarPlot(title=title, metrics=[column], orientation="h", max_runs_to_show=100, **together)

    log = "perplexity" in metric
    return {
        "Held out": [curve(metric, x, f"{metric} over {name}", log_y=log) for x, name in AXES.items()],
        "At the end": [bars(metric, metric), bars("val/loss", "val/loss")],
        "Training loss": [curve("train/loss", x, f"train/loss over {name}", log_y=True) for x, name in AXES.items()],
        "Throughput and memory": [bars(column, title) for column, title in COST.items()],
        "Staleness": [curve(column, "samples_seen", title) for column, title in FIRST_STAGE.items()],
        "Configuration": [wr.RunComparer(diff_only="split")],
    }


def workspace(options: Mapping[str, Any]) -> Any:
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    columns = ["config:seed.value", "config:stages.value", f"summary:{options['metric']}"]
    return ws.Workspace(
        entity=options["entity"] or "",
        project=options["project"],
        name=title(options),
        sections=[
            ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections(options["metric"]).items()
        ],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config("method")],
            filters=expr.And(expr.Metric("Group") == options["group"]) if options["group"] else "",
            pinned_columns=columns,
        ),
    )


def document(options: Mapping[str, Any]) -> Any:
    """A W&B report: the same panels under headings."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    # a run set without a project uses that of the report; naming it would ask W&B at once
    of = {"entity": options["entity"], "project": options["project"]} if not options["out"] else {}
    blocks: list[Any] = [wr.P("Lines and bars are means over the runs of a method, with one standard deviation.")]
    for name, panels in sections(options["metric"]).items():
        runs = wr.Runset(
            name=options["group"] or "all runs",
            groupby=["config.method"],
            filters=expr.And(expr.Metric("Group") == options["group"]) if options["group"] else "",
            **of,
        )
        for n, panel in enumerate(panels):  # three per row
            panel.layout = wr.Layout(x=8 * (n % 3), y=6 * (n // 3), w=8, h=6)
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(
        entity=options["entity"] or "", project=options["project"], title=title(options), blocks=blocks, width="fluid"
    )


def title(options: Mapping[str, Any]) -> str:
    return options["title"] or f"pipeback: methods compared{' on ' + options['group'] if options['group'] else ''}"


def specification(thing: Any) -> dict[str, Any]:
    """Return the specification for W&B; wandb-workspaces has no public name for it before saving."""
    return thing._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def dashboard(options: Mapping[str, Any]) -> str:
    """Write the dashboard to `out`, or save it to W&B; return its file or address."""
    if options["kind"] not in KINDS:
        raise ValueError(f"kind must be {' or '.join(KINDS)}, but is {options['kind']!r}")
    make = workspace if options["kind"] == "workspace" else document
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"a dashboard needs {error.name}: pip install 'pipeback[wandb]'") from error
    if options["out"]:
        out = Path(options["out"]).expanduser()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(specification(make(options)), indent=1, ensure_ascii=False), encoding="utf-8")
        return f"{out}: the {options['kind']}, not sent to W&B"
    try:
        entity = options["entity"] or wandb.Api().default_entity
        saved = make({**options, "entity": entity}).save()
    except (wandb.Error, ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"the {options['kind']} cannot be saved to W&B: {said} (or write it to a file with out=dashboard.json)"
        ) from error
    return saved.url


def run(settings: DictConfig) -> None:
    with mistakes("dashboard"):
        print(dashboard({name: value for name, value in plain(settings).items() if name != "hydra"}))


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage(__doc__, "dashboard"))
        return
    sys.argv[1:] = [quoted(word) for word in sys.argv[1:]]
    GlobalHydra.instance().clear()
    with mistakes("dashboard"), raising():
        hydra.main(config_path="pkg://pipeback.conf", config_name="dashboard", version_base="1.3")(run)()


if __name__ == "__main__":
    main()
