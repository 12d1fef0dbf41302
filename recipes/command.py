"""Starts a command: Hydra composes its configuration, and a mistake in it gives one line that names the cure."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import pipeback
from pipeback.recipes.usage import grouped_usage

TRACEBACK = "HYDRA_FULL_ERROR"  # if the user sets it to 1, Hydra and these commands show tracebacks
ONE_LINE = "PIPEBACK_ONE_LINE"  # set if these commands set the other one, and not the user
MISTAKES = (ValueError, TypeError, CompactHydraException, OmegaConfBaseException)


def start(command: str, task: Callable[[DictConfig], Any], config: str | None = None) -> None:
    """Run `task` with the config of the command, once, or over a sweep (-m); or show its help."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(grouped_usage(sys.modules[task.__module__].__doc__ or "", command, config or command, sys.argv[1:]))
        return
    sys.argv[1:] = ordered([quoted(word) for word in sys.argv[1:]])
    offer_installed_methods()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a `_target_` in a file of the user's own, as for `python script.py`
    GlobalHydra.instance().clear()
    with mistakes(command), raising():
        hydra.main(config_path="pkg://pipeback.conf", config_name=config or command, version_base="1.3")(task)()


@contextmanager
def raising() -> Iterator[None]:
    """Have Hydra raise errors instead of printing them, in this process and its children."""
    if os.environ.get(TRACEBACK) == "1":
        yield
        return
    os.environ.update({TRACEBACK: "1", ONE_LINE: "1"})
    try:
        yield
    finally:
        for name in (TRACEBACK, ONE_LINE):
            os.environ.pop(name, None)


@contextmanager
def mistakes(command: str) -> Iterator[None]:
    """A context in which a mistake in the input ends the command with one line, unless HYDRA_FULL_ERROR=1 is set."""
    full = os.environ.get(TRACEBACK) == "1" and ONE_LINE not in os.environ
    try:
        yield
    except MISTAKES as error:
        if full:
            raise
        fail(command, error)


def ordered(words: list[str]) -> list[str]:
    """Sort overrides before the flags of Hydra, whose parser wants each kind in one piece."""
    valued = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c")
    flags = [word.startswith("-") or before in valued for before, word in zip(["", *words], words, strict=False)]
    return [w for w, flag in zip(words, flags) if not flag] + [w for w, flag in zip(words, flags) if flag]


def quoted(word: str) -> str:
    """Quote a value with another = or a ~ in it, as the grammar of Hydra demands: ckpt_path=epoch=3.ckpt, out=~/out."""
    key, equals, value = word.partition("=")
    bare = re.fullmatch(r"[^'\"{}\[\](),$\\]*[=~][^'\"{}\[\](),$\\]*", value)
    return f"{key}='{value}'" if equals and bare and not key.startswith("-") else word


def offer_installed_methods() -> None:
    """Accept method=<name> for methods of other packages too, which have no file in conf/method."""
    for point in entry_points(group=pipeback.methods.GROUP):
        ConfigStore.instance().store(group="method", name=point.name, node={"name": point.name})


def fail(command: str, error: BaseException | str) -> NoReturn:
    """End the command with the message of a mistake in the input, without a traceback."""
    text = error if isinstance(error, str) else explained(error)
    print(f"pipeback {command}: {text}", file=sys.stderr)
    sys.exit(2)


def explained(error: BaseException) -> str:
    """Say in one line what is wrong and what was probably meant."""
    text, cause = in_one_line(error), error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"there is no {group}={name}{suggestion(name, error.options)}; there are {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}: {text}"
    if text.startswith("Ambiguous value for argument "):
        word = text.split("'")[1]
        return f"{word}: several values are a sweep, which -m asks for; a list stands in brackets, [a,b]"
    if isinstance(cause, OmegaConfBaseException) and text.startswith("Could not override") and cause.full_key:
        return no_option(cause.full_key, cause.parent_node or {})
    if isinstance(error, InstantiationException) and cause is not None:
        return unexpected(error, cause) or in_one_line(cause)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {text}"
    if isinstance(error, CompactHydraException) and isinstance(cause, OmegaConfBaseException):
        return f"{text} {in_one_line(cause)}"
    return text


def in_one_line(error: BaseException) -> str:
    """Return the message without the parts for Hydra's developers."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=", "See https:")))


def unexpected(error: InstantiationException, cause: BaseException) -> str | None:
    """Return a message about an option that a `_target_` does not take, with a similar one; None for other errors."""
    target = re.search(r"Error in call to target '([\w.]+)'", str(error))
    option = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    if target is None or option is None:
        return None
    near = suggestion(option[1], inspect.signature(get_object(target[1])).parameters)
    return f"{target[1].rpartition('.')[2]} has no option {option[1]!r}{near}"


def no_option(key: str, there: Iterable[Any]) -> str:
    """data.rot -> there is no option data.rot; did you mean 'data.root'?   there: the config at its place"""
    prefix, dot, name = key.rpartition(".")
    values: dict[Any, Any] = plain(there, resolve=False) if isinstance(there, DictConfig) else dict.fromkeys(there)
    known = [str(k) for k in values if k != "hydra"]
    inside = {k: f"{group}.{k}" for group, node in values.items() if isinstance(node, dict) for k in node}
    if name in ("methods", "seeds", "jobs", "again"):
        return f"{key} is an option of `pipeback compare`, not of this command"
    if not prefix and name in inside:
        return f"there is no option {key}; did you mean {inside[name]!r}?"
    if near := suggestion(name, known, prefix + dot):
        return f"there is no option {key}{near}"
    return f"there is no option {key}; there are {', '.join(prefix + dot + k for k in known)}"


def suggestion(name: Any, known: Iterable[Any], prefix: str = "") -> str:
    near = get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.55)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""


def plain(config: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Return the config as plain values, with interpolations resolved."""
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(k): v for k, v in values.items()}
