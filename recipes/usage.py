"""Usage: the output of `pipeback COMMAND --help`: the command's docstring, and its options with the comments of conf/.

What conf/ says is read from its files, and stands nowhere else.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

CONF = importlib.resources.files("pipeback.conf")
FIRST, WIDTH = 24, 100  # columns of the names, and of a line
MORE = """\
GROUP=CHOICE takes another one, and GROUP.OPTION=VALUE changes one of its options, for example optimizer.lr=0.05.
Options of a choice with their comments: {command} GROUP=CHOICE --help. The whole configuration: --cfg job.
-m runs several values one after the other: seed=0,1,2. Your own files: --config-dir FOLDER."""


def usage(doc: str | None, config: str) -> str:
    """Return the docstring of a recipe, and the top-level options of conf/<config>.yaml with their comments."""
    return "\n".join([(doc or "").strip(), "", "options, written name=value:", *_table(_options(config))])


def grouped_usage(doc: str, command: str, config: str, words: Sequence[str]) -> str:
    """The same for a command whose config has groups, such as data: which choices there are, and which one stands.

    words: those beside --help; for GROUP=CHOICE among them the options of that choice are returned.
    """
    groups = dict(_groups(config))
    asked = [(word.partition("=")[0], word.partition("=")[2]) for word in words if "=" in word]
    asked = [(group, choice) for group, choice in asked if choice in _choices(group)]
    if asked:
        return "\n\n".join("\n".join(_choice(group, choice)) for group, choice in asked)
    parts = [doc.strip(), "", f"options, written name=value, for example {_example(config)}:"]
    known: dict[str, tuple[str, str, str]] = {}
    for name in (config, *_parents(config)):
        known = {**{option[0]: option for option in _options(name)}, **known}
    parts += _table([*known.values()])
    parts += ["", "groups, written group=choice; * stands where nothing is written:"]
    for group, default in groups.items():
        names = ", ".join(name + "*" * (name == default) for name in _choices(group))
        own = ", ".join(name for name, _, _ in _options(f"{group}/{default}") if name != "name")
        parts += _wrapped(group, names)
        parts += _wrapped("", f"options of {default}: {own}") if own else []
    return "\n".join([*parts, "", *MORE.format(command=f"pipeback {command}").splitlines()])


def _text(config: str) -> list[str]:
    return CONF.joinpath(f"{config}.yaml").read_text("utf-8").splitlines()


def _example(config: str) -> str:
    """What the first comment of a config shows."""
    found = re.search(r"\b(\w+=\w+)", _text(config)[0])
    return found[1] if found else "seed=1"


def _options(config: str) -> list[tuple[str, str, str]]:
    """The top-level options of a config: name, value, comment. A list or dictionary is shown by three dots."""
    found = []
    for line in _text(config):
        if option := re.match(r"(?!defaults:|hydra:|_target_:)(\w+):([^#]*)(?:#(.*))?$", line):
            name, value, comment = (part.strip() if part else "" for part in option.groups())
            found.append((name, value or "…", comment))
    return found


def _parents(config: str) -> list[str]:
    """The configs that a config begins with."""
    return [line[4:] for line in _text(config) if re.fullmatch(r"  - (?!_self_)\w+", line)]


def _groups(config: str) -> Iterator[tuple[str, str]]:
    """The groups of a config, and the choice that stands in each."""
    for name in (*_parents(config), config):
        for line in _text(name):
            if found := re.fullmatch(r"  - (?:override /)?(\w+): (\w+)", line):
                yield found[1], found[2]


def _choices(group: str) -> list[str]:
    place = CONF.joinpath(group)
    return sorted(file.name.removesuffix(".yaml") for file in place.iterdir()) if place.is_dir() else []


def _choice(group: str, choice: str) -> list[str]:
    """The file of a choice: its first comments, and its options with theirs."""
    about = []
    for line in _text(f"{group}/{choice}"):
        if not line.startswith("#") or line.startswith("# @"):
            break
        about.append(line.lstrip("# "))
    prefix = "" if group == "experiment" else f"{group}."  # an experiment sets options of the command
    return [f"{group}={choice}", *about, "", *_table(_options(f"{group}/{choice}"), prefix)]


def _table(options: Sequence[tuple[str, str, str]], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, value, comment in options:
        lines += _wrapped(f"{prefix}{name}={value}", comment)
    return lines


def _wrapped(first: str, rest: str) -> list[str]:
    """Lines with `first` in their first column, and `rest` beside it, or below it where it is long."""
    long = len(first) >= FIRST
    beside = wrap(rest, WIDTH - FIRST - 2) or [""]
    lines = [f"  {'' if n or long else first:<{FIRST}}{part}".rstrip() for n, part in enumerate(beside)]
    if long:
        fits = len(first) + 4 + len(beside[0]) <= WIDTH
        return [f"  {first}  {beside[0]}".rstrip(), *lines[1:]] if fits else [f"  {first}", *lines]
    return lines
