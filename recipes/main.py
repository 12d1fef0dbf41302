"""`pipeback train|compare|report|dashboard|draw|plan|bench ...` is the same as `python recipes/<command>.py ...`."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches

import pipeback
from pipeback.recipes import extras, forks, unshown

COMMANDS = {
    "train": "train one method and watch it, or sweep:   pipeback train method=cerebras",
    "compare": "every method on the same data:             pipeback compare experiment=digits",
    "sweep": "methods x rates x seeds, one small file:   pipeback sweep experiment=delay_lm rates=[1e-3,2e-3]",
    "results": "show and draw such a file again:       pipeback results outputs/sweep/delay_lm",
    "report": "rebuild the report of finished runs:       pipeback report outputs/compare/digits",
    "dashboard": "the same comparison on Weights & Biases:   pipeback dashboard --help",
    "draw": "draw a schedule:                           pipeback draw --help",
    "plan": "what a training takes, before it begins:   pipeback plan --help",
    "zoo": "models from elsewhere, split and trained:   pipeback zoo resnet18 gpt2",
    "bench": "speed and memory, as ratios in one run:    pipeback bench",
}


def usage() -> str:
    lines = "\n".join(f"  {name:<11}{line}" for name, line in COMMANDS.items())
    help_ = "pipeback COMMAND --help shows its options; pipeback --version shows which version this is."
    return f"usage: pipeback COMMAND [OPTION=VALUE ...]\n\n{lines}\n\n{help_}"


def main(argv: list[str] | None = None) -> None:
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return
    if command in ("-V", "--version"):
        print(f"pipeback {pipeback.__version__}")
        return
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.exit(f"pipeback: unknown command {command!r}{hint}\n\n{usage()}")
    sys.argv = [f"pipeback {command}", *rest]
    unshown.replaced()
    if command in ("compare", "sweep") and not {"jobs=1", "--help", "-h"} & {*rest}:
        forks.begin()
    recipe = None
    try:
        recipe = importlib.import_module(f"pipeback.recipes.{command}")
        recipe.main()
    except ModuleNotFoundError as error:
        installed = error.name is None or error.name.startswith("pipeback")
        if installed or not (recipe is None or extras.here(error)):
            raise
        sys.exit(extras.needs(f"pipeback {command}", error, {"dashboard": "wandb", "zoo": "models"}.get(command, "")))


if __name__ == "__main__":
    main()
