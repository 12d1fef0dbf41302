"""The pages of docs/ and README.md as tests: their code runs, what it prints stands below it, their commands parse."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)


class Printed(NamedTuple):
    """What a block prints. `text`: just that, with … for anything; `output`: what one machine printed once."""

    fence: str
    language: str
    text: str

    def agrees(self, printed):
        if self.language == "output":  # numbers and units are of that machine
            return all(line.split()[0] in printed for line in self.text.strip().splitlines())
        pattern = "".join(".*?" if part == "…" else re.escape(part) for part in re.split("(…)", self.text.strip()))
        return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


class Block(NamedTuple):
    language: str
    text: str
    line: int
    prints: Printed | None  # the block right below it


def pages():
    """Every page, README among them, as a path from the project's folder."""
    found = [path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "data"} & set(path.parts)]
    return [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]]


def blocks(page, language=None):
    """The fenced blocks of a page; of one language, if it is named."""
    text = (ROOT / page).read_text("utf-8")
    matches = list(FENCE.finditer(text))
    found = []
    for match, after in zip_longest(matches, matches[1:]):
        below = after and after["language"] in ("text", "output") and not text[match.end() : after.start()].strip()
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match["language"], match["text"], line, Printed(**after.groupdict()) if below else None))
    return [block for block in found if language in (None, block.language)]


def run(page, scope, code=None):
    """Execute the Python blocks of a page one after the other in `scope`; what a block prints is the text below it.

    code: changes a block's text before it runs. A block whose first line is a comment with a file's name is written to
    that file, in the folder of now, and not run.
    """
    for block in blocks(page, "python"):
        text = block.text if code is None else code(block.text)
        if name := re.match(r"# (\w+\.py)\n", text):
            Path(name[1]).write_text(text, "utf-8")
            importlib.invalidate_caches()
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec"), scope)
        if block.prints is not None:
            assert block.prints.agrees(printed.getvalue()), f"{page}:{block.line} prints\n{printed.getvalue()}"


def commands(page):
    """The commands of a page's shell blocks."""
    for block in blocks(page, "shell"):
        yield from commands_of(block.text)


def commands_of(text):
    """The commands of a shell block, without comments, as lists of words."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.partition("#")[0].split("; "):
            if words := shlex.split(part):
                yield words


def check(words, cwd):
    """Run a command, if it is quick; else ask as much of it as can be told without running it."""
    head, *rest = words
    checks = {"make": _make, "pip": _pip, "pipeback": _pipeback, "python": _python, "torchrun": _torchrun, "git": _git}
    assert head in checks, f"{head!r}: say in tests/helpers/pages.py how a test checks this command"
    checks[head](rest, cwd)


def _make(rest, cwd):
    text = (ROOT / "Makefile").read_text("utf-8")
    for word in rest:
        name, given, _ = word.partition("=")
        assert re.search(rf"^{name}( \?=|:)" if given else rf"^{name}:", text, re.MULTILINE), word


def _pip(rest, cwd):
    assert rest[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras


def _pipeback(rest, cwd):
    from pipeback.recipes import bench
    from tests.recipes.cli import pipeback

    command = rest[0]
    if command.startswith("-"):
        assert pipeback(*rest, cwd=cwd).returncode == 0
        return
    if command == "bench":
        bench.parsed(rest[1:])
        return
    if command in ("train", "compare", "sweep"):  # Hydra composes and checks the configuration, of the first of a sweep
        first = [re.sub(r"=([^\[\],]+),.*", r"=\1", word) for word in rest if word not in ("-m", "--cfg", "job")]
        rest = [re.sub(r"^(data\.root)=.*", r"\1=.", word) for word in first] + ["--cfg", "job"]
    elif (
        command in ("plan", "report", "dashboard", "zoo")
        or (command == "results" and any(Path(word).parts[:1] == ("outputs",) for word in rest))
        or "--run" in rest
        or any(w.startswith("model=") for w in rest)
    ):
        rest = [command, "--help"]
    done = pipeback(*rest, cwd=cwd)
    assert done.returncode == 0, done.stderr


def _python(rest, cwd):
    if rest[0] == "-m":
        assert (ROOT / f"{rest[1].replace('.', '/')}.py").exists() or (ROOT / rest[1].replace(".", "/")).is_dir(), rest
    elif rest[0] == "recipes/bench.py":
        _pipeback(["bench", *rest[1:]], cwd)
    else:
        assert (ROOT / rest[0]).exists() or (Path(cwd) / rest[0]).exists(), rest


def _torchrun(rest, cwd):
    """For real, where the page has written the script."""
    if not (Path(cwd) / rest[-1]).exists():
        return
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *rest]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def _git(rest, cwd):
    assert rest
