"""Segment: one stage of a traced model. Its inputs and outputs are the tensors that cross the stage boundaries.

Its modules and parameters are the user's, under the names that they have in the model. A segment has one `Script` per
form of micro-batch (shapes, types, training or evaluation); `print(segment.__script__())` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.splitting.autocast_regions import Entered
from pipeback.splitting.call_outputs import Opened
from pipeback.splitting.call_trace import Attribute, Call
from pipeback.splitting.in_place import settled
from pipeback.splitting.input_forms import ByForm, Key, key_of, written
from pipeback.splitting.lent import Lent
from pipeback.splitting.module_walk import register
from pipeback.splitting.refusals import decided_anew
from pipeback.splitting.script_values import argument, as_weight, in_a_row, without_gradient
from pipeback.splitting.stage_script import Name, Script
from pipeback.tensors import accelerators
from pipeback.tensors.structures import Form, Ref


class LooksAlike(ValueError):
    """Micro-batches of two forms cannot be told apart at a stage."""


class Decided:
    """Checks a value by which Python decides; raises if it differs from that in the trace."""

    __name__, __module__ = "decided", "pipeback"

    def __init__(self, function: Callable[..., Any], expected: Any, who: str, whole: str) -> None:
        self.function, self.expects, self.who, self.whole = function, expected, who, whole

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        found = self.function(*args, **kwargs)
        if found != self.expects:
            name = getattr(self.function, "__name__", "a function")
            raise decided_anew(self.who, self.whole, name, found, self.expects)


class Carried:
    """Copies a weight for later stages, with its value for this micro-batch; the copy is kept while the value stays."""

    __name__, __module__ = "carried", "pipeback"

    def __init__(self) -> None:
        self.copy: Tensor | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if self.copy is None or self.copy.shape != weight.shape or not torch.equal(self.copy, weight):
            self.copy = weight.detach().clone()
        found: Tensor = _Handed.apply(weight, self)
        return found


class _Handed(torch.autograd.Function):
    """Gives the copy; its gradient is passed on to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, carried: Carried) -> Tensor:
        assert carried.copy is not None
        return carried.copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@dataclass
class SegmentWork:
    """The work of a segment for one form of micro-batch: `calls` compute the tensors numbered `gives` from `takes`."""

    calls: list[Call]
    takes: list[int]
    gives: list[int]
    fixed: set[int]  # inputs without a gradient: a mask that needs one may get slower kernels
    lends: dict[str, int]  # own weights that travel to later stages, and their numbers
    borrows: dict[str, int]  # weights of earlier stages, and their numbers
    constants: Mapping[str, Tensor]
    still: Collection[int] = ()  # what calls give without a gradient
    form: Form | None = None  # of the model's output, in the last segment
    device: torch.device | None = None  # the device of the trace; it computes where its input is


class Wording:
    """What messages say of a path in the model. It leads to all of the model, so a copy of a segment shares it."""

    def __init__(self, describe: Callable[[str], str], kept: Callable[[str], str]) -> None:
        self.describe, self.kept = describe, kept  # a module at this path, and how to keep it whole

    def __deepcopy__(self, memo: object) -> Wording:
        return self


class Segment(nn.Module):
    """One stage of a traced model.

    owned: modules, parameters and buffers of the model by their names. unsaved: buffers that are in no state_dict.
    """

    def __init__(
        self,
        label: str,
        owned: Mapping[str, Any],
        wording: Wording,
        unsaved: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.__label__, self.__wording = label, wording
        for name, part in sorted(owned.items(), key=lambda item: isinstance(item[1], Tensor)):  # modules first
            if not _has(self, name):
                register(self, name, part, persistent=name not in unsaved)
        self.__setting__ = 0  # see `AttributeReads.number`
        self.__in_mode__: dict[bool, int] = {}  # the same, where all modules of the model train, or none
        self.__rewritten__: set[str] = set()  # parameters that it writes into
        self.__entered: list[Entered] = []  # of all scripts
        self.__carried: dict[str, Carried] = {}
        self.__scripts: ByForm[tuple[Script, Form | None]] = ByForm()

    def forward(self, given: Any) -> Any:
        parts = given if type(given) is tuple else (given,)
        found = self.__scripts.get(key_of(parts, self.training, self.__setting__))
        if found is None:
            raise RuntimeError(f"{self.__label__}: {self.__unknown(parts)}")
        # autocast caches its casts of leaves; the inputs of a stage are leaves here, but not in the model
        if self.__entered or accelerators.autocast():
            parts = tuple(x.view_as(x) if x.requires_grad and x.is_leaf else x for x in parts)
        memory = [(p, p.data) for p in map(self.get_parameter, self.__rewritten__)]
        try:
            out = found[0].function(*parts)
        except BaseException:
            self.__left()
            raise
        for p, before in memory:
            settled(p, before)
        return out[0] if len(out) == 1 else out

    def __structured__(self, given: Any, out: Any) -> Any:
        """Return the model's output from the tensors `out`, which the last segment gave for `given`."""
        parts = given if type(given) is tuple else (given,)
        found = self.__scripts.get(key_of(parts, self.training, self.__setting__))
        form = None if found is None else found[1]
        assert form is not None
        return form.fill(out if type(out) is tuple else (out,))

    def __learn__(self, key: Key, portion: SegmentWork) -> None:
        """Learn the work for a form. Raises ValueError if its key is that of a form with other work."""
        script, known = self.__built(portion), list(self.__scripts.alike(key))
        if any(form != portion.form or not other.does(script) for other, form in known):
            raise LooksAlike(
                f"{self.__label__}: micro-batches of two forms look alike at this stage, but need different "
                "operations; pad them to one form"
            )
        same = (other for other, form in self.__scripts.values() if form == portion.form and other.does(script))
        self.__scripts.add(key, (next(same, script), portion.form))  # the forms of a model differ in few stages

    @contextmanager
    def __instead__(self, others: Mapping[int, Tensor]) -> Iterator[None]:
        """A context within which scripts use other tensors than those with these identities."""
        scripts = [script for script, _ in self.__scripts.values()]
        try:
            for script in scripts:
                script.put(others)
            yield
        finally:
            for script in scripts:
                script.put({})

    def __forget__(self) -> None:
        """Forget all forms."""
        self.__scripts = ByForm()

    def __script__(self) -> str:
        """Return its script for every form that it knows, as Python."""
        found = zip(self.__scripts, self.__scripts.values(), strict=True)
        return "\n".join(f"# {written(key)}\n{script.code()}\n" for key, (script, _) in found)

    def __left(self) -> None:
        """Leave every autocast region, as after an error."""
        for entered in self.__entered:
            entered.close()

    def __unknown(self, parts: Sequence[Any]) -> str:
        known = "; ".join(written(key) for key in self.__scripts)
        return (
            f"a micro-batch of {written(key_of(parts, self.training, self.__setting__))} came, but the model was "
            f"traced with {known}; where shapes depend on values (x[mask]), have them do so within one module: "
            "give its path in stages=pipeback.Splitting(leaves=[...]), or keep the whole model one stage: "
            "stages=pipeback.Splitting(leaves=[''])"
        )

    def __built(self, portion: SegmentWork) -> Script:
        script, known = Script(), dict[int, Name]()
        for number in portion.takes:
            known[number] = script.take()
        for number in portion.takes:
            if number in portion.fixed:
                known[number] = script.call(Tensor.detach, (known[number],))

        def attribute(name: str) -> Name:
            if name in portion.borrows:
                return script.once(as_weight, (known[portion.borrows[name]],))
            constant = portion.constants.get(name)
            return script.part(name, _looked_up(self, name) if constant is None else constant)

        def filled(value: Any) -> Any:
            if isinstance(value, Ref):
                return known[value.number]
            if isinstance(value, torch.device) and value == portion.device:
                return script.once(getattr, (known[portion.takes[0]], "device"))
            return attribute(value.name) if isinstance(value, Attribute) else value

        entered: Entered | None = None
        for call in portion.calls:
            entered = self.__autocast(script, call, entered)
            found = self.__called(script, call, filled, known, portion)
            if call.form is None:
                known.update(dict.fromkeys(call.out, found))
                continue
            words = self.__wording
            who = words.describe(call.target) if call.module else getattr(call.target, "__name__", "a function")
            still = [n for n, number in enumerate(call.out) if number in portion.still]
            opens = Opened(call.form, still, who, words.kept(call.where))
            known.update(zip(call.out, script.unpack(opens, (found,), len(call.out)), strict=True))
        if entered is not None:
            script.call(entered, ())
        # last, so that what later stages add to a weight's gradient comes first, as in the backward of the model itself
        for name, number in portion.lends.items():
            carried = self.__carried.setdefault(name, Carried())
            known[number] = script.call(carried, (attribute(name),))
        return script.end([known[number] for number in portion.gives])

    def __autocast(self, script: Script, call: Call, entered: Entered | None) -> Entered | None:
        """Return the autocast region of a call, which the script enters here; it leaves another region first."""
        if call.autocast != (entered.expects if entered is not None else ()):
            for turn in (entered, entered := Entered(call.autocast) if call.autocast else None):
                if turn is not None:
                    script.call(turn, ())
                    self.__entered.append(turn)
        return entered

    def __called(
        self, script: Script, call: Call, filled: Callable[[Any], Any], known: dict[int, Name], portion: SegmentWork
    ) -> Name:
        """Write one call and return the name of its output. filled: gives an argument with names for its tensors."""
        args = [argument(script, filled, arg, n in call.left) for n, arg in enumerate(call.args)]
        kwargs = {k: argument(script, filled, arg, k in call.left) for k, arg in call.kwargs.items()}
        left = [args[k] if isinstance(k, int) else kwargs[k] for k in call.left]
        function = call.target
        if call.module:
            module = self.get_submodule(call.target)
            if isinstance(module, Lent):
                args.insert(0, [known[portion.borrows[f"{call.target}.{name}"]] for name in module.__names__])
            function = script.part(call.target, module)
        elif call.check is not None:
            words = self.__wording
            function = Decided(function, call.check[0], words.describe(call.where), words.kept(call.where))
        if not call.grad and call.check is None:
            function, args = without_gradient, [function, *args]
        found = script.call(function, args, kwargs)
        return script.call(in_a_row, (found, *left)) if left else found


def _looked_up(root: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    found = getattr(root.get_submodule(path), key)
    assert isinstance(found, Tensor)
    return found


def _has(root: nn.Module, name: str) -> bool:
    """Whether the root has a module, parameter or buffer of that path."""
    for step in name.split("."):
        root = getattr(root, step, None)  # type: ignore[assignment]
    return root is not None
