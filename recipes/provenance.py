"""Provenance: date, commit, versions, machine and command, with which every file of results begins."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import pipeback


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """Return the provenance of a measurement in this process. device: the accelerator that it uses, if any."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "pipeback": pipeback.__version__,
        "machine": machine(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of this package, with "-dirty" if files differ from it; None outside its repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        asked = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(device: torch.device | None = None) -> str:
    """Return processor, cores, accelerator (if there is one) and system."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    name = found[1].strip() if found else platform.processor() or "unknown processor"
    gpu = f", {torch.cuda.get_device_name(device)}" if device is not None and device.type == "cuda" else ""
    return f"{name}, {os.cpu_count()} cores{gpu}, {platform.system()} {platform.machine()}"


def load() -> float | None:
    """What else the machine does now: processes that want to run, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def command(words: Iterable[str] | None = None) -> str:
    """Return the command as it was typed. words: its arguments as they were typed, if `main` has changed them."""
    name, *known = sys.argv
    return f"{'python ' if name.endswith('.py') else ''}{name} {shlex.join(known if words is None else words)}".strip()


def heading(command: str, facts: Mapping[str, Any]) -> str:
    """Return the first lines of a file of results, in Markdown. facts: those of `provenance`, `threads` and `load`."""
    sentence = {
        "date": " on {}", "commit": " at commit {}", "pipeback": " (version {})", "machine": ", on {}",
        "torch": ", torch {}", "python": ", Python {}", "threads": ", intra-op threads per process: {}",
        "load": ", load before: {}",
    }  # fmt: skip
    told = [words.format(facts[name]) for name, words in sentence.items() if facts.get(name) is not None]
    return f"```shell\n{command}\n```\n\nMeasured{''.join(told)}.\n"
