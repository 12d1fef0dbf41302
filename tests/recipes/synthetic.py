"""Small runs as `pipeback train` writes them, without training: facts, and rows of a made-up log."""

import csv
import math

import yaml

FACTS = {
    "experiment": "digits", "runtime": "event loop", "stages": 4, "micro_batch_size": 1, "batch_size": 32,
    "update_size": 1, "optimizer": {"name": "SGD", "lr": 0.003, "momentum": 0.997}, "metric": "val/accuracy",
    "mode": "max", "epoch_samples": 320, "epochs": 2, "classes": 10, "bubble": 0.013, "bubble_micro_batches": 320,
    "torch": "2.15.0", "pipeback": "0.1.0", "python": "3.11.7", "machine": "a machine, 2 cores", "threads": 1,
    "date": "2026-11-22", "commit": "0123abc",
}  # fmt: skip
SLACK = {"sgd": 0, "gpipe": 0, "pipedream": 1, "spectrain": 1}


def facts(method="pb", seed=0, **changed):
    stages = changed.get("stages", FACTS["stages"])
    slack = 2 if method.endswith("_slack2") else SLACK.get(method, 2)
    own = {
        "method": method, "method_options": {"name": method.removesuffix("_slack2"), "slack": None}, "seed": seed,
        "delays": [slack * (stages - 1 - s) for s in range(stages)], "slack2": slack == 2,
    }  # fmt: skip
    return {**FACTS, **own, **changed}


def rows(values, *, every=10, batch=32, rate=100.0, column="val/accuracy", loss=0.3, gaps=None, monitor=True):
    """One validation every `every` batches, with these values; training takes batch / rate seconds a batch.

    gaps: ‖w_now − w_used‖ of each stage, logged with each validation.
    """
    found = []
    for n, value in enumerate(values, start=1):
        step = n * every
        x = {"step": step - 1, "epoch": (step * batch - 1) // 320, "samples_seen": step * batch}
        x["wall_time"] = step * batch / rate
        if monitor:
            seen = {f"pipeback/gap/stage_{s:02}": gap / n for s, gap in enumerate(gaps or [])}
            seen |= {f"pipeback/delay/stage_{s:02}": 2.0 * (len(gaps) - 1 - s) for s in range(len(gaps or []))}
            found.append({**x, "train/loss": 2.0 * loss / n, **seen, "pipeback/throughput": rate,
                          "pipeback/utilisation": 0.9, "pipeback/weight_copies": 2.0, "pipeback/state_copies": 0.0,
                          "pipeback/activation_mb": 0.5})  # fmt: skip
        else:
            found.append({**x, "train/loss": 2.0 * loss / n})
        found.append({**x, column: value, "val/loss": loss if math.isfinite(value) else math.nan})
    return found


def write(folder, facts, rows, config=None):
    """The files of a run: hparams.yaml, metrics.csv and, if there is one, config.yaml."""
    folder.mkdir(parents=True)
    (folder / "hparams.yaml").write_text(yaml.safe_dump(facts))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "metrics.csv", "w", newline="") as file:
        log = csv.DictWriter(file, columns)
        log.writeheader()
        log.writerows(rows)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder
