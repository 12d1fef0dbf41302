"""Mendings, each taken back: what the library did before. The search must find every one.

A revert is pieces of the library's text, by module, with what stands there instead. `python -m tests.fuzz
--revert NAME` searches with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from tests.mutation import LIBRARY, change


class Revert(NamedTuple):
    """pieces: of each module of the library, (text, what stands there instead). where: which programs are searched, as
    `strategies.programs` takes it: those of one optimizer, model or runtime, or with a call more often.
    """

    pieces: dict[str, tuple[tuple[str, str], ...]]
    where: dict[str, Any]

    def text(self, module: str, text: str) -> str:
        """The module's text with it. Raises ValueError where a piece is not there once: the mending looks otherwise."""
        for piece, instead in self.pieces[module]:
            if text.count(piece) != 1:
                raise ValueError(f"pipeback/{module}.py has {piece!r} {text.count(piece)} times; write it anew")
            text = text.replace(piece, instead)
        return text


def revert(module: str, *pieces: tuple[str, str], **where: Any) -> Revert:
    return Revert({module: pieces}, where)


REVERTS: dict[str, Revert] = {
    "joined twins of an optimizer that counts": revert(
        "stages/joint_optimizer",
        ("return kind in _SEPARABLE and all(", "return all("),
        ("not separable(first)  #", "False  #"),
        optimizer="counting",
    ),
    "a state without the counter of an optimizer": revert(
        "stages/counted",
        ("options = sorted(mine.options)", "options: list[tuple[int, str]] = []"),
        optimizer="counting",
        call="reload",
    ),
    "sums of gradients in .grad, where zero_grad and a backward of the user's reach them": revert(
        "stages/gradients",
        ("            p.grad = g  # whatever others may have left there", "            pass"),
        (
            "            self._shown = True\n        else:\n            for p",
            "            self._shown = True\n        elif False:\n            for p",
        ),
        (
            "        self.hide()\n        values, self.values = self.values, [None] * len(self.params)\n",
            "        values, self.values = [p.grad for p in self.params], [None] * len(self.params)\n"
            "        for p in self.params:\n            p.grad = None\n",
        ),
        call="zero_grad",
    ),
    "a replaced weight is looked for at one weight a push": revert(
        "pipeline/intact",
        (
            "            n = places.changed()\n            if n is None",
            "            n = None\n            if n is None",
        ),
        call="replace",
    ),
    "hooks on stages that run as one": revert(
        "pipeline/intact",
        ("        self._check_hooks()\n", ""),
        call="listen",
        runtime={"vectorize": True},
        model="linear",
    ),
    "a function of the weights that another shape has": revert(
        "pipeline/rehearsals",
        ("tuple((part.shape, part.dtype) for part in parts)", "tuple(part.dtype for part in parts)"),
        model="weighed",
        method="pb-2",
    ),
    "a stage that begins to draw later on": revert(
        "pipeline/rehearsals",
        ("                    begin_stream(stage)", "                    pass"),
        model="dropping",
        call="dropout",
    ),
    "a state of other frozen weights": revert(
        "stages/stage_state",
        ('if different := sorted(set(trains) ^ set(plain.get("trained", trains))):', "if different := []:"),
        call="foreign",
    ),
    "vectorize: outputs that are not contiguous": Revert(
        {
            "vectorized/capture": (("y.contiguous() if isinstance(y, Tensor) else y", "y"),),
            "vectorized/graph_rewrites": (
                ('{aten.view.default: "reshape"', '{aten.view.default: "view"'),
                ("node.target = aten.reshape.default", "pass"),
            ),
        },
        {"runtime": {"vectorize": True}, "model": "depthwise"},
    ),
    "vectorize: a change in place first": revert(
        "vectorized/capture",
        ("(x.clone() if clones else x,))\n\n    def all_of", "(x,))\n\n    def all_of"),
        runtime={"vectorize": True},
        model="in place",
    ),
    "a loss that differentiates": revert(
        "stages/rehearsal",
        (
            "    except Exception:  # a loss may differentiate something itself",
            "    except ZeroDivisionError:  #",
        ),
        loss="sloping",
    ),
    "a bad batch is let in": revert(
        "pipeline/rehearsals",
        ("or _kind(batches[0]) not in self._kinds", ""),
        call="bad",
        method="sgd",  # others have each form rehearsed
        runtime={"workers": 2},  # one thread takes back what fails
    ),
    "a velocity that was cleared": revert(
        "runtime/reread",
        ("            if not _same(_kept(stage), known):", "            if False:"),
        call="clear",
        method="cerebras",
        optimizer="momentum",
    ),
    "weights that were written in flight": revert(
        "runtime/written",
        ("        if [t._version for t in self._tensors] != self._seen:", "        if False:"),
        call="fill",
    ),
    "fused steps of joined stages": revert(
        "stages/joint_optimizer",
        ("        lay_state(self._twin.state, self._twin.param_groups)\n", ""),
        ("with fitting(self._twin) if self._fused else nullcontext():", "with nullcontext():"),
        optimizer="fused-momentum",
    ),
    "modules that are called by keyword": revert(
        "stages/rehearsal", ('args[0] if args else kwargs.get("input")', "args[0]"), model="named"
    ),
}


def take_back(name: str) -> None:
    """In this process, which has not imported the library yet."""
    found = REVERTS[name]
    for module in found.pieces:
        change(module, partial(found.text, module))


def stale() -> dict[str, str]:
    """The reverts that do not fit the library any more, and why."""
    told = {}
    for name, found in REVERTS.items():
        try:
            for module in found.pieces:
                found.text(module, (LIBRARY / f"{module}.py").read_text(encoding="utf-8"))
        except ValueError as error:
            told[name] = str(error)
    return told
