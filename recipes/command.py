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
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    CompactHydraException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import pipeback
from pipeback.recipes.usage import grouped_usage

TRACEBACK = "HYDRA_FULL_ERROR"  # if the user sets it to 1, Hydra and these commands show tracebacks
ONE_LINE = "PIPEBACK_ONE_LINE"  # set if these commands set the other one, and not the user
MISTAKES = (ValueError, TypeError, CompactHydraException, OmegaConfBaseException, yaml.YAMLError)
UNLOADED = "Error(s) in loading state_dict"  # what torch says of a checkpoint of another model
NUMBER = re.compile(r"[+-]?[\d._]+(?:[eE][+-]?\d+)?")
# flags of Hydra with a value; --info may have one
VALUED = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c",
          "--experimental-rerun")  # fmt: skip
LIBRARY = re.compile(r'(?:method=)?pipeback\.methods\.create\("lwp", form="weight"\)')  # method=lwp_w of a command


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
    except Exception as error:
        if full or not mistaken(error):
            raise
        fail(command, error)


def mistaken(error: Exception) -> bool:
    """Whether an error is one of the input: an option, a file or a checkpoint; others are shown with a traceback."""
    if isinstance(error, MISTAKES):
        return True
    if isinstance(error, OSError):
        return error.filename is not None
    if isinstance(error, ImportError):
        return str(error).startswith("Error loading '")  # Hydra's, of a _target_
    unloaded = isinstance(error, RuntimeError) and str(error).startswith(UNLOADED)
    return unloaded and naming("ckpt_path") is not None


def naming(option: str = "", value: str = "") -> str | None:
    """Return option=value as it was typed, of the option with this name, or of one whose value begins the path."""
    for word in sys.argv[1:]:
        key, equals, given = word.partition("=")
        if key.startswith("hydra."):
            continue  # a command's own
        given = given.strip("'\"")
        if equals and given and (key == option or (value and f"{value}/".startswith(f"{given.rstrip('/')}/"))):
            return f"{key}={given}"
    return None


def ordered(words: list[str]) -> list[str]:
    """Sort overrides before the flags of Hydra, whose parser wants each kind in one piece."""
    flags = [
        word.startswith("-") or before in VALUED or (before in ("--info", "-i") and word[:1] != "~" and "=" not in word)
        for before, word in zip(["", *words], words, strict=False)
    ]
    return [w for w, flag in zip(words, flags) if not flag] + [w for w, flag in zip(words, flags) if flag]


def quoted(word: str) -> str:
    """Quote a value that the grammar of Hydra would not take: ckpt_path=epoch=3.ckpt, out=~/out, out=Größe, title=a&b.

    What stands in brackets, braces or quotes is left as it is, and values between commas are quoted one by one.
    """
    key, equals, value = word.partition("=")
    if key == "out" and NUMBER.fullmatch(value):
        return f"{key}='{value}'"  # a folder, 1e3 too, which would be 1000.0
    if not equals or key.startswith("-") or value[:1] in tuple("'\"[{") or read(word):
        return word
    found = f"{key}={','.join(part if read(f'{key}={part}') else literal(part.strip()) for part in value.split(','))}"
    return found if read(found) else word


def read(word: str) -> bool:
    """Whether Hydra can read an override."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def literal(text: str) -> str:
    """Return text as a value in Hydra's grammar, whatever characters it has."""
    if re.fullmatch(r"[\w./-]+", text, re.ASCII):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


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
    text, cause = LIBRARY.sub("method=lwp_w", in_one_line(error)), error.__cause__
    if isinstance(error, OSError) and error.filename is not None:
        option = naming(value=str(error.filename))
        return f"{f'{option}: ' if option else ''}{error.filename}: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        return f"a file of the configuration is not YAML: {text}"
    if isinstance(error, RuntimeError) and text.startswith(UNLOADED):
        told = text if len(text) < 160 else f"{text[:160]}…"
        return f"{naming('ckpt_path')} does not fit: give the options of its run, which its config.yaml has ({told})"
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
    if isinstance(values.get("_target_"), str) and name in inspect.signature(get_object(values["_target_"])).parameters:
        taken = f"{values['_target_'].rpartition('.')[2]} takes it"
        return f"there is no option {key} in the configuration, but {taken}; write +{key}=... to add it"
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
