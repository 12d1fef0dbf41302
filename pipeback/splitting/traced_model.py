"""Traced model: a model that is trained as it is, its own forward followed and cut into stages.

Values that a later stage needs, skip connections and masks for example, are handed along from stage to stage; their
gradients come back the same way and are summed where they part. A weight that stages share (a tied embedding) belongs
to the first of them: to the others it travels with every micro-batch, as its first stage's forward finds it, and its
gradient travels back. So it is one weight with one delay, that of its owner, under every method.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.private import FakeTensorMode, pytree
from pipeback.splitting.as_before import untouched
from pipeback.splitting.branches import MOST, Branch, decisions, mark, told
from pipeback.splitting.caches import caching, without_caches
from pipeback.splitting.cut_points import Cuts, Unit, blocks_of, chosen, family, joined, leaves, units
from pipeback.splitting.dataflow import hand_along
from pipeback.splitting.escapes import looked_into
from pipeback.splitting.faithful import check_equal
from pipeback.splitting.held import Held, modes
from pipeback.splitting.left_behind import Name, again
from pipeback.splitting.ownership import Ownership
from pipeback.splitting.partition import StagePart
from pipeback.splitting.record import Call, CallTrace
from pipeback.splitting.refusals import kept_whole, left_out
from pipeback.splitting.segment import Key, Segment, key_of
from pipeback.splitting.tracer import trace_forward
from pipeback.splitting.work import Work
from pipeback.tensors import accelerators
from pipeback.tensors.copies import replica
from pipeback.tensors.meta import shaped
from pipeback.tensors.structures import Form, Ref, opened


class Arguments(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Known(NamedTuple):
    """A form of micro-batch that was followed."""

    inputs: Form
    output: Form
    answers: list[Any]  # what Python has decided by
    decisions: list[Branch]  # by numbers of the input: where they fall otherwise, it is another variant
    mark: Tensor | None = None  # of the variant, where there may be others

    def marked(self, x: Any) -> Any:
        """The tensors of a micro-batch as the stages take them."""
        return x if self.mark is None else (*_parts(x), self.mark)


class TracedModel:
    """A model and its stages. example: what a push brings, of one micro-batch or more.

    cuts: where to cut, see `cut_points`. whole: paths of modules that are not looked into. by: what stages of a
    number are balanced by. Raises ValueError naming layer and cure.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        cuts: Cuts = "auto",
        whole: Sequence[str] = (),
        by: str = "time",
    ) -> None:
        self.model, self.cuts = model, chosen(cuts)
        self._check(whole, by)
        self.rewritten: set[str] = set()  # parameters that its forward writes into
        self.whole, self.opened = set(whole), set[str]()  # paths: what stays whole, and what is looked into after all
        self.family = family(model)
        self.blocks = blocks_of(model) if self.cuts in ("auto", "block") or isinstance(self.cuts, int) else []
        if self.cuts == "block" and not self.blocks:
            raise ValueError(
                f'stages="block": {type(model).__name__} repeats no block in a list of modules; use stages="layer"'
            )
        self.kind: Cuts = ("block" if self.blocks else "layer") if self.cuts == "auto" else self.cuts
        self.held = Held(model)
        self._known: dict[Key, Known] = {}
        self._variants: dict[Key, list[Known]] = {}  # of every form, the ways that the model goes
        arguments, complete = self.arguments(example), self.complete
        record, known = self._first(arguments, complete, whole, by)
        self.ownership = Ownership(model, self._staged(record), len(self.units), record.changed)
        saved = set(model.state_dict())
        self.segments = [self._segment(s, saved) for s in range(len(self.units))]
        self.rewritten = record.changed.intersection(dict(model.named_parameters()))
        for s, segment in enumerate(self.segments):
            segment.__rewritten__ = self.ownership.names_of(s, self.rewritten)
        self._copies: list[Sequence[nn.Module]] = [self.segments]
        x = self._take(record, self.enter(arguments)[0], None, known)
        if complete:
            self._prove(arguments, x)
        if caching(model):
            warnings.warn(
                f"{type(model).__name__} has use_cache=True, but key-value caches are for generation: its stages give "
                "none (use_cache=False in its config silences this)",
                stacklevel=2,
            )

    # -- in and out ----------------------------------------------------------------------------------------------

    def arguments(self, x: Any) -> Arguments:
        """How the model is called with what was pushed: a dictionary has keywords, a tuple positions."""
        if isinstance(x, Arguments):
            return x
        if isinstance(x, dict):
            return Arguments((), x)
        one = isinstance(self.model, nn.Sequential) or not isinstance(x, tuple)
        return Arguments((x,) if one else x, {})

    def enter(self, x: Any) -> tuple[Any, Form]:
        """The tensors of what was pushed, as the first stage takes them, and where they stood."""
        tensors, form = opened(tuple(self.arguments(x)))
        if not tensors:
            raise TypeError(f"push takes tensors, or structures with tensors in them, but got {type(x).__name__}")
        return tensors[0] if len(tensors) == 1 else tuple(tensors), form

    def leave(self, output: Any, x: Any, training: bool | None) -> Any:
        """The model's output from the tensors that the last stage gave for the tensors x."""
        form = self._known[self._key(x, training)].output
        return form.fill(_parts(output))

    def known(self, x: Any, form: Form, training: bool | None) -> Any | None:
        """The tensors x with the mark of their variant, None if the model was not followed for such."""
        parts = _parts(x)
        for known in self._variants.get(self._key(parts, training), ()):
            if known.inputs == form and all(decision.holds(parts) for decision in known.decisions):
                return known.marked(x)
        return None

    def prepare(self, x: Any, form: Form, training: bool | None) -> Any:
        """Know what to do for tensors as x: follow the model once more. Returns them with the mark of their variant.

        training: the mode of every module; None: as they are set.
        """
        args, kwargs = form.fill(_parts(x))
        with modes(self.model, training):
            record, known = self._follow(Arguments(args, kwargs), real=self.complete)
        return self._take(record, x, training, known)

    def forms(self) -> list[dict[str, Any]]:
        """The forms of micro-batches that are known, as plain values: a saved state has micro-batches of these."""
        found = []
        settings = {self.segments[0].__setting__, *map(self.held.number, (None, False, True))}
        for (training, setting, *tensors), ways in self._variants.items():
            if setting not in settings:
                continue
            for known in ways:
                found.append({
                    "training": training,
                    "tensors": [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in tensors],
                    "structure": pytree.treespec_dumps(known.inputs.spec),
                    "constants": [_plain(c) for c in known.inputs.constants],
                    "answers": known.answers,
                    "decisions": [decision.number for decision in known.decisions],
                    "mark": None if known.mark is None else list(known.mark.shape),
                })  # fmt: skip
        return found

    def know(self, forms: Sequence[Mapping[str, Any]]) -> None:
        """Follow the model on these forms, by shapes alone."""
        for form in forms:
            training = None if form["training"] == self.model.training else form["training"]
            x = tuple(torch.empty(shape, dtype=getattr(torch, kind)) for shape, kind in form["tensors"])
            constants = tuple(Ref(c["tensor"]) if isinstance(c, dict) else c for c in form["constants"])
            structure = Form(pytree.treespec_loads(form["structure"]), constants)
            ways = self._variants.get(self._key(x, training), ())
            if any(way.inputs == structure and way.answers == form["answers"] for way in ways):
                continue
            arguments = Arguments(*structure.fill(x))
            with modes(self.model, training):
                record, known = self._follow(arguments, real=False, answers=form["answers"])
            shape = form.get("mark")
            known = known._replace(
                decisions=[decision for decision in known.decisions if decision.number in form.get("decisions", ())],
                mark=None if shape is None else torch.zeros(shape, dtype=torch.bool),
            )
            self._take(record, x, training, known)

        self.set(self.held.number())

    def set(self, number: int) -> None:
        """Have the stages know what the model is set to: a number of `held`."""
        for copy in self._copies:
            for segment in copy:
                segment.__setting__ = number  # type: ignore[assignment]

    def follow_too(self, segments: Sequence[nn.Module]) -> None:
        """Copies of the segments are to know what these do."""
        self._copies.append(segments)

    @property
    def complete(self) -> bool:
        """Whether all weights are here with their values."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return not any(t.is_meta or (t.numel() and not t.untyped_storage().size()) for t in tensors)

    @property
    def parts(self) -> list[StagePart]:
        """The stages, with the names that they have in reports."""
        labels = [self._label(unit) for unit in self.units]
        counts = Counter(labels)
        for s, unit in enumerate(self.units):
            if counts[labels[s]] > 1:
                labels[s] = unit.names[0] if unit.names and unit.names[0] not in labels else f"{labels[s]}#{s}"
        return [StagePart(label, segment) for label, segment in zip(labels, self.segments, strict=True)]

    # -- following -----------------------------------------------------------------------------------------------

    def _check(self, whole: Sequence[str], by: str) -> None:
        paths = dict(self.model.named_modules())
        for path in whole:
            if path not in paths:
                raise ValueError(f"leaves: {type(self.model).__name__} has no module {path!r}; named_modules() has all")
        if by not in ("time", "memory"):
            raise ValueError(f'balance must be "time" or "memory", but is {by!r}')

    def _first(self, arguments: Arguments, real: bool, whole: Sequence[str], by: str) -> tuple[CallTrace, Known]:
        """Follow the example, and cut."""
        number = isinstance(self.cuts, int)
        finest: Cuts = ("block" if self.blocks else "layer") if number else self.kind
        self._leaves = leaves(self.blocks if finest == "block" else (), whole, self.opened)
        work = Work() if number and by == "time" else None
        record, known = self._follow(arguments, real, work=work)
        self.units = units(self.model, record, finest, self.blocks)
        if isinstance(self.cuts, int):
            if self.cuts > len(self.units) and finest == "block":
                self._leaves = leaves((), whole, self.opened)
                record, known = self._follow(arguments, real, work=work)
                self.units = units(self.model, record, "layer", ())
            self.units = joined(self.units, self.cuts, by)
        return record, known

    @looked_into
    @again
    def _follow(
        self,
        arguments: Arguments,
        real: bool,
        answers: Sequence[Any] | None = None,
        work: Work | None = None,
        left: Collection[Name] = (),
    ) -> tuple[CallTrace, Known]:
        tensors, form = opened(tuple(arguments))
        if real:
            with self._unchanged():
                record, _ = trace_forward(self.model, *_apart(arguments), self._leaves, work=work, left=left)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                own = dict([*self.model.named_buffers(), *self.model.named_parameters()])
                values = {name: shaped(t) for name, t in own.items()}
                args, kwargs = form.fill([fake.from_tensor(t) for t in tensors])
                saved = None if answers is None else iter(answers)
                record, _ = trace_forward(
                    self.model, args, kwargs, self._leaves, values,
                    partial(told, tensors) if saved is None else lambda *asked: next(saved), work, left,
                )  # fmt: skip
        self.held.add(record.decided)
        found = [each for each in decisions(record) if answers is not None or each.holds(tensors)]
        return record, Known(form, record.form, record.answers, found)

    def _prove(self, arguments: Arguments, x: Any) -> None:
        args, kwargs = _apart(arguments)
        check_equal(self.model, lambda: without_caches(self.model(*args, **kwargs)), self.segments, x, self._unchanged)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Its buffers and the random state afterwards as before."""
        devices = {t.device for t in [*self.model.parameters(), *self.model.buffers()]}
        with untouched(self.model, self.rewritten), accelerators.forked(devices):
            yield

    # -- stages --------------------------------------------------------------------------------------------------

    def _segment(self, s: int, saved: Collection[str]) -> Segment:
        label, owned = f"stage {s} ({self._label(self.units[s])})", self.ownership.owned[s]
        return Segment(
            label,
            owned,
            self._describe,
            self._kept,
            self.ownership.copied[s] | (set(owned) - set(saved)),
        )

    def _label(self, unit: Unit) -> str:
        """Its layer; of several, the longest path that holds all their weights, or from where to where they lie."""
        if not unit.names or self.kind in ("layer", "sublayer"):
            return unit.names[0] if unit.names else unit.start or "input"
        paths = [name.split(".") for name in unit.names]
        common = []
        for steps in zip(*paths, strict=False):
            if len(set(steps)) > 1:
                break
            common.append(steps[0])
        return ".".join(common) or f"{paths[0][0]}…{paths[-1][0]}"

    def _describe(self, path: str) -> str:
        module = self.model.get_submodule(path)
        return f"{type(module).__name__} {path!r}" if path else type(module).__name__

    def _kept(self, path: str) -> str:
        return kept_whole(self.model, path)

    def _staged(self, record: CallTrace) -> Iterator[tuple[int, Call]]:
        """Every call with its stage."""
        s, last = 0, len(self.units) - 1
        for call in record.calls:
            if s < last:
                start = self.units[s + 1].start
                if start == call.target if call.module else start in call.attributes():
                    s += 1
            yield s, call
        if s != last:
            raise ValueError(
                f"{type(self.model).__name__} does not come to {self.units[s + 1].start!r} for every micro-batch, or "
                "in another order, so that stages cannot follow one another; keep the whole model one stage: "
                "leaves=['']"
            )

    # -- from a record to what each segment does -----------------------------------------------------------------

    def _key(self, x: Any, training: bool | None) -> Key:
        """Of tensors x; training: None: as the model is set."""
        return key_of(_parts(x), self.model.training if training is None else training, self.held.number(training))

    def _take(self, record: CallTrace, x: Any, training: bool | None, known: Known) -> Any:
        """Have the stages know what to do for micro-batches as x; returns x with its mark."""
        others = self._variants.setdefault(self._key(x, training), [])
        if len(others) == MOST:
            raise ValueError(
                f"{type(self.model).__name__}.forward has gone {MOST} ways for micro-batches of one form, and goes yet "
                f"another one: {_asked(known)}; keep decisions by values within one layer: give the path of the "
                "deciding module in leaves="
            )
        differs = any(o.inputs != known.inputs for o in others)
        if known.mark is None and (known.decisions or differs):
            taken = [o.mark for o in others if o.mark is not None]
            known = known._replace(mark=mark(known.decisions, taken, known.inputs.constants if differs else ()))
        marked = known.marked(x)
        key = self._key(marked, training)
        try:
            staged = list(self._staged(record))
            if not all(self.ownership.able(s, call) for s, call in staged):
                raise ValueError(
                    f"{type(self.model).__name__}.forward comes to its layers in another order than for the example, "
                    "so that stages cannot follow one another; keep the whole model one stage: leaves=['']"
                )
        except ValueError:
            if (able := self.ownership.staged(record.calls)) is None:
                if (call := self.ownership.unknown(record.calls)) is not None:
                    raise left_out(self.model, call.where, call.target) from None
                raise
            staged = able
        asked = {decision.number for decision in known.decisions}
        labels = [segment.__label__ for segment in self.segments]
        found = hand_along(record, staged, self.ownership, labels, known.mark, asked)
        for s, (portion, forms) in enumerate(found):
            for copy in self._copies:
                copy[s].__learn__(key if s == 0 else (*key[:2], *forms), portion)  # type: ignore[operator]
        self._known[key] = known
        others.append(known)
        return marked


def _apart(arguments: Arguments) -> Arguments:
    """With tensors of its own: a model may change what it is called with."""
    tensors, form = opened(tuple(arguments))
    return Arguments(*form.fill([replica(tensor) for tensor in tensors]))


def _parts(value: Any) -> tuple[Tensor, ...]:
    return value if type(value) is tuple else (value,)


def _asked(known: Known) -> str:
    """What it decided by last."""
    call = known.decisions[-1].calls[-1] if known.decisions else None
    if call is None:
        return f"what is pushed besides tensors is another each time, {_shown(known.inputs)}; push tensors instead"
    return f"{call.target.__name__} gave {call.check[0]}"


def _plain(value: Any) -> Any:
    """What stands in a structure, for JSON."""
    if isinstance(value, Ref):
        return {"tensor": value.number}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"a micro-batch has a {type(value).__name__} in it, {value!r}, which a saved state cannot hold; push tensors, "
        "numbers and strings"
    )


def _shown(form: Form) -> str:
    return str(form.fill([f"tensor {n}" for n in range(len(form.constants))]))
