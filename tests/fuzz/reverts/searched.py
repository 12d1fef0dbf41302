"""Mendings that the random search misses: each is taken back, and the search must find a program that shows it."""

from __future__ import annotations

from .revert import Revert, revert

SEARCHED: dict[str, Revert] = {
    "joined twins of an optimizer that counts": revert(
        "stages/joint_optimizer",
        ("return kind in _SEPARABLE and all(", "return all("),
        ("not separable(first)  #", "False  #"),
        optimizer="counting",
    ),
    "a state without the counter of an optimizer": revert(
        "stages/optimizer_counters",
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
        "pipeline/model_check",
        (
            "            n = places.changed()\n            if n is None",
            "            n = None\n            if n is None",
        ),
        call="replace",
    ),
    "hooks on stages that run as one": revert(
        "pipeline/model_check",
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
        ("                    stage.random.begin(stage.generator)", "                    pass"),
        model="dropping",
        call="dropout",
    ),
    "a state of other frozen weights": revert(
        "stages/state_check",
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
        "runtime/optimizer_state_watch",
        ("            if not _same(_kept(stage), known):", "            if False:"),
        call="clear",
        method="cerebras",
        optimizer="momentum",
    ),
    "weights that were written in flight": revert(
        "runtime/weight_write_watch",
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
    "names in state.json are followed": revert(
        "checkpoint/folders",
        ('if name in ("", ".", "..") or {"/", os.sep, os.altsep} & set(name):', "if False:"),
        call="damaged",
    ),
}
