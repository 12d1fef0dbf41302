"""Where numbers come from: date, commit, versions, machine and command, which every file of results begins with."""

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
    """Of what is measured now, in this process; device: the accelerator that it is measured on."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "pipeback": pipeback.__version__,
        "machine": machine(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of this package, with "-dirty" where files differ from it; None outside its repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        asked = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(device: torch.device | None = None) -> str:
    """Processor, cores and system; the accelerator where there is one."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    name = found[1].strip() if found else platform.processor() or "unknown processor"
    gpu = f", {torch.cuda.get_device_name(device)}" if device is not None and device.type == "cuda" else ""
    return f"{name}, {os.cpu_count()} cores{gpu}, {platform.system()} {platform.machine()}"


def command(words: Iterable[str] | None = None) -> str:
    """As it was typed; words: what was typed behind its name, where `main` has rewritten that."""
    name, *known = sys.argv
    return f"{'python ' if name.endswith('.py') else ''}{name} {shlex.join(known if words is None else words)}".strip()


def heading(command: str, facts: Mapping[str, Any]) -> str:
    """The first lines of a file of results, in Markdown. facts: of `provenance`; `threads`, `load`."""
    sentence = {
        "date": " on {}", "commit": " at commit {}", "pipeback": " (version {})", "machine": ", on {}",
        "torch": ", torch {}", "python": ", Python {}", "threads": ", intra-op threads per process: {}",
        "load": ", load before: {}",
    }  # fmt: skip
    told = [words.format(facts[name]) for name, words in sentence.items() if facts.get(name) is not None]
    return f"```shell\n{command}\n```\n\nMeasured{''.join(told)}.\n"
