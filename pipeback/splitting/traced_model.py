"""Traced model: a model whose own forward is traced and cut into stages; the model itself is not changed.

Values that a later stage needs, skip connections and masks for example, are passed from stage to stage; their gradients
come back the same way and are summed where the paths meet. A weight that stages share (a tied embedding) belongs to the
first of them. It travels to the others with every micro-batch, with the value that the first stage's forward saw, and
its gradient travels back. So it is one weight with one delay, that of its owner, under every method.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipeback.private import FakeTensorMode
from pipeback.splitting.attribute_changes import Name, again
from pipeback.splitting.attribute_reads import PUSHED, WAYS, AttributeReads, CallWay, called, saved_way, way_of
from pipeback.splitting.branches import decisions, told
from pipeback.splitting.call_arguments import Arguments, arguments_of
from pipeback.splitting.call_cost import Work
from pipeback.splitting.call_trace import Call, CallTrace
from pipeback.splitting.cut_points import Cuts, Unit, blocks_of, chosen, cut_units, family, joined, leaves
from pipeback.splitting.dataflow import hand_along
from pipeback.splitting.draw_checks import check_draws
from pipeback.splitting.escaped_tensors import looked_into
from pipeback.splitting.forward_check import check_equal
from pipeback.splitting.input_forms import Key, key_of
from pipeback.splitting.key_value_caches import caching, without_caches
from pipeback.splitting.known_forms import Known, example_of, tensors_of, traced_as_saved, with_own_tensors
from pipeback.splitting.module_hooks import check_hooks, kept_for_hooks, traced_into
from pipeback.splitting.module_restore import untouched
from pipeback.splitting.module_walk import KINDS, held, unsaved_buffers, walked
from pipeback.splitting.outside_draws import OutsideDraws
from pipeback.splitting.ownership import Ownership
from pipeback.splitting.partition import StagePart
from pipeback.splitting.refusals import kept_whole, left_out
from pipeback.splitting.segment import LooksAlike, Segment, Wording
from pipeback.splitting.size_decisions import deciding_by_sizes
from pipeback.splitting.stage_names import label, labels
from pipeback.splitting.uncompiled import eagerly
from pipeback.splitting.value_reads import check_value_reads
from pipeback.splitting.variants import Variants
from pipeback.tensors import accelerators
from pipeback.tensors.batches import bare
from pipeback.tensors.copies import pieces, to_device
from pipeback.tensors.meta import shaped
from pipeback.tensors.structures import Form, opened


class TracedModel:
    """A model and its stages. example: the input of a push, with at least one micro-batch.

    cuts: where to cut, see `cut_points`. whole: paths of modules that are not traced into. by: "time" or "memory", by
    which a given number of stages is balanced. Raises ValueError, which names the layer and the cure.
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
        self.whole, self.opened = set(whole), set[str]()  # paths: modules kept whole, modules traced into after all
        self.deep = False  # see `looked_into`
        self.family = family(model)
        self.blocks = blocks_of(model) if self.cuts in ("auto", "block") or isinstance(self.cuts, int) else []
        if self.cuts == "block" and not self.blocks:
            raise ValueError(
                f'stages="block": {type(model).__name__} repeats no block in a list of modules; use stages="layer"'
            )
        self.kind: Cuts = ("block" if self.blocks else "layer") if self.cuts == "auto" else self.cuts
        self._walked = walked(model)  # its modules, as they were when it was traced last
        self.held = AttributeReads(p for _, p in held(self._walked, "_parameters"))
        self._cures: dict[str, str] = {}
        self._variants = Variants(type(model).__name__)
        self.units: list[Unit] = []
        arguments, complete = self.arguments(example), self.complete
        entered, _ = self._entered(example, arguments)  # refuses what has no tensors
        record, known = self._first(arguments, complete, by)
        self.ownership = Ownership(model, self._walked, list(self._staged(record)), len(self.units), record)
        unsaved = unsaved_buffers(self._walked)
        self.segments = [self._segment(s, unsaved) for s in range(len(self.units))]
        self.rewritten = record.changed and record.changed.intersection(dict(model.named_parameters()))
        for s, segment in enumerate(self.segments):
            segment.__rewritten__ = self.ownership.names_of(s, self.rewritten)
            segment.training = model.training  # the attribute alone: its modules are the model's, in their own modes
        self._copies: list[Sequence[nn.Module]] = []
        self.follow_too(self.segments)
        x = self._take(record, entered, PUSHED, known)
        if complete:
            self._prove(arguments, x)
        vars(self).pop("_restores", None)  # and the copies of buffers in it
        if caching(self._walked.values()):
            warnings.warn(
                f"{type(model).__name__} has use_cache=True, but key-value caches are for generation: its stages give "
                "none (use_cache=False in its config silences this)",
                stacklevel=2,
            )

    # -- in and out ----------------------------------------------------------------------------------------------

    def arguments(self, x: Any) -> Arguments:
        """Return the model's arguments from a push, see `call_arguments`."""
        return Arguments(*bare(tuple(x))) if isinstance(x, Arguments) else arguments_of(self.model, x)

    def enter(self, x: Any) -> tuple[Any, Form]:
        """Return the tensors that were pushed, as the first stage takes them, and the structure around them."""
        return self._entered(x, self.arguments(x))

    def _entered(self, x: Any, arguments: Arguments) -> tuple[Any, Form]:
        tensors, form = opened(tuple(arguments))
        array = any(getattr(c, "ndim", 0) and hasattr(c, "__array__") for c in form.constants)
        if array or not tensors:
            found = "with an array in it" if array else "without a tensor"
            raise TypeError(
                f"push takes tensors, or structures with tensors in them, but got {type(x).__name__} {found}; make "
                'tensors by torch.as_tensor, or have the tokenizer give them: return_tensors="pt"'
            )
        return tensors[0] if len(tensors) == 1 else tuple(tensors), form

    def leave(self, output: Any, x: Any, training: bool | None) -> Any:
        """Return the model's output, from the tensors that the last stage gave for the tensors x."""
        return self._variants.output(self._key(x, way_of(training))).fill(tensors_of(output))

    def known(self, x: Any, form: Form, training: bool | None) -> Any | None:
        """Return the tensors x with the mark of their variant; None if the model was not traced for their form."""
        parts = tensors_of(x)
        for known in self._variants.of(self._key(parts, way_of(training))):
            if known.inputs == form and all(decision.holds(parts) for decision in known.decisions):
                return known.marked(x)
        return None

    def prepare(self, x: Any, form: Form, training: bool | None) -> Any:
        """Trace the model again, for tensors like x; return them with their variant's mark. training: see `way_of`."""
        (args, kwargs), way = form.fill(tensors_of(x)), way_of(training)
        # casts that it leaves in torch's cache would be used in training, of weights that a store had not brought yet
        with accelerators.under(accelerators.casting()), called(self.model, way):
            record, known = self._follow(Arguments(args, kwargs), real=self.complete)
        vars(self).pop("_restores", None)
        return self._take(record, x, way, known)

    def forms(self) -> list[dict[str, Any]]:
        """Return the known forms as plain values, for a saved state, whose micro-batches in flight have these forms."""
        return self._variants.plain(self._settings())

    def know(self, forms: Sequence[Mapping[str, Any]], flying: bool) -> None:
        """Trace the model for these forms of a saved state. flying: whether it has micro-batches in flight.

        Micro-batches in flight have the marks that tell these forms apart, so other forms that are known are forgotten.
        """
        if not self._variants.hold(forms, self._settings()):
            self._variants.clear()
            for segment in chain.from_iterable(self._copies):
                segment.__forget__()  # type: ignore[operator]
        for form in (*forms, *forms):  # tracing one may find attributes by which another is known anew
            with accelerators.under(accelerators.read(form.get("autocast", ()))):  # earlier states have none
                self._know(form, flying)
        self.set(self.held.number())

    def _settings(self) -> dict[int, bool]:
        return {self.segments[0].__setting__: True, **{self.held.number(way): way.graph for way in WAYS}}

    def _know(self, form: Mapping[str, Any], flying: bool) -> None:
        (x, structure), way = example_of(form), saved_way(form, self.model.training)
        ways = self._variants.of(self._key(x, way))
        if any(way.inputs == structure and way.answers == form["answers"] for way in ways):
            return
        follow = partial(self._follow, Arguments(*structure.fill(x)), answers=form["answers"])
        with called(self.model, way):
            found = traced_as_saved(type(self.model).__name__, form, follow, self.complete, flying)
        vars(self).pop("_restores", None)
        if found is not None:
            self._take(found[0], x, way, found[1].as_saved(form), saved=True)

    def set(self, number: int) -> None:
        """Tell the stages the model's settings, by their number in `AttributeReads`."""
        in_mode = {training: self.held.number(CallWay(training, True)) for training in (False, True)}
        for copy in self._copies:
            for segment in copy:
                segment.__setting__, segment.__in_mode__ = number, in_mode  # type: ignore[assignment]

    def follow_too(self, segments: Sequence[nn.Module]) -> None:
        """Register copies of the segments, which learn all forms that these know."""
        self._copies.append(segments)
        self.ownership.copies.add(segments)

    @property
    def complete(self) -> bool:
        """Whether all weights are here with their values."""
        tensors = [t for kind in KINDS for _, t in held(walked(self.model), kind)]
        found = [piece for t in tensors for piece in pieces(t)]
        return not any(t.is_meta or (t.numel() and not t.untyped_storage().size()) for t in found)

    @property
    def parts(self) -> list[StagePart]:
        """The stages, with the names that they have in reports."""
        return [StagePart(*each) for each in zip(labels(self.units, self.kind), self.segments, strict=True)]

    # -- tracing -------------------------------------------------------------------------------------------------

    def _check(self, whole: Sequence[str], by: str) -> None:
        paths = walked(self.model) if whole else {}
        for path in whole:
            if path not in paths:
                raise ValueError(f"leaves: {type(self.model).__name__} has no module {path!r}; named_modules() has all")
        if by not in ("time", "memory"):
            raise ValueError(f'balance must be "time" or "memory", but is {by!r}')

    @torch.enable_grad()  # a model that is evaluated first may be trained later; a forward may still use no_grad
    def _first(self, arguments: Arguments, real: bool, by: str) -> tuple[CallTrace, Known]:
        """Trace the model on the example, and choose the cuts."""
        number = isinstance(self.cuts, int)
        finest: Cuts = ("block" if self.blocks else "layer") if number else self.kind
        work = Work() if number and by == "time" else None
        record, known = self._cut(arguments, real, finest, work)
        if isinstance(self.cuts, int):
            if self.cuts > len(self.units) and finest == "block":
                record, known = self._cut(arguments, real, "layer", work)
            self.units = joined(self.units, self.cuts, by)
        return record, known

    def _cut(self, arguments: Arguments, real: bool, finest: Cuts, work: Work | None) -> tuple[CallTrace, Known]:
        """Trace the model on the example, and find the units of this granularity."""
        blocks = self.blocks if finest == "block" else []
        begun = {*blocks, *(() if isinstance(finest, (str, int)) else finest)}
        self.whole.update(kept_for_hooks(self._walked, leaves(blocks, self.whole, self.opened), begun))
        self._leaves = leaves(blocks, self.whole, self.opened)
        record, known = self._follow(arguments, real, work=work)
        fixed = {*self.opened, *self.whole, *begun}
        if found := deciding_by_sizes(self.model, record, known.decisions, fixed):
            self.whole.update(found)
            record, known = self._follow(arguments, real, work=work)
        self.units = cut_units(self.model, record, finest, blocks)
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
        check_hooks(self._walked, self._leaves)
        tensors, form = opened(tuple(arguments))
        trace = partial(self._trace, arguments, real, answers, left)
        record = trace(work)
        if record.draws is not None:  # something was drawn; in its leaves, or between them
            record = trace(work, fine=True)
        self.held.add(record.decided, self._walked, [m for _, m in traced_into(self._walked, self._leaves)])
        check_draws(self.model, record, partial(trace, fine=True))
        check_value_reads(self.model, record)
        found = [each for each in decisions(record) if answers is not None or each.holds(tensors)]
        return record, Known(form, record.form, record.answers, found, shapes=not real)

    def _trace(
        self,
        arguments: Arguments,
        real: bool,
        answers: Sequence[Any] | None,
        left: Collection[Name],
        work: Work | None = None,
        fine: bool = False,
    ) -> CallTrace:
        from pipeback.splitting.tracer import trace_forward  # here, since a sequence is not traced

        saved = None if answers is None else iter(answers)
        answer = None if saved is None else lambda *asked: next(saved)
        if real:
            with self._unchanged(anew=True):
                return trace_forward(
                    self.model, *with_own_tensors(arguments, self._walked.device), self._leaves, answers=answer,
                    work=work, left=left, outside=OutsideDraws(self._restores.generators, fine), within=self._walked,
                    deep=self.deep,
                )[0]  # fmt: skip
        (tensors, form), device = opened(tuple(arguments)), walked(self.model).device
        with eagerly(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            own = dict([*self.model.named_buffers(), *self.model.named_parameters()])
            values = {name: shaped(t) for name, t in own.items()}
            args, kwargs = form.fill([to_device(device, fake.from_tensor(t)) for t in tensors])
            return trace_forward(
                self.model, args, kwargs, self._leaves, values, answer or partial(told, tensors), work, left,
                deep=self.deep,
            )[0]  # fmt: skip

    def _prove(self, arguments: Arguments, x: Any) -> None:
        args, kwargs = with_own_tensors(arguments, self._walked.device)
        x = to_device(self._walked.device, x)
        unchanged = partial(self._unchanged, anew=False)  # it has been restored since it was traced
        if self.rewritten:
            self._restores = untouched(self.model, self.rewritten, self._walked)
        check_equal(self._walked, lambda: without_caches(self.model(*args, **kwargs)), self.segments, x, unchanged)

    @contextmanager
    def _unchanged(self, anew: bool) -> Iterator[None]:
        """A context that restores the model and the random state on exit. anew: to what they are now, not earlier."""
        if anew:
            self._walked = walked(self.model)
            self._restores = untouched(self.model, self.rewritten, self._walked)
        with eagerly(), self._restores, accelerators.forked(self._walked.devices):
            yield

    # -- stages --------------------------------------------------------------------------------------------------

    def _segment(self, s: int, unsaved: Collection[str]) -> Segment:
        return Segment(
            f"stage {s} ({label(self.units[s], self.kind)})",
            self.ownership.owned[s],
            Wording(self._describe, self._kept),
            self.ownership.copied[s].union(unsaved),
        )

    def _describe(self, path: str) -> str:
        module = self.model.get_submodule(path)
        return f"{type(module).__name__} {path!r}" if path else type(module).__name__

    def _kept(self, path: str) -> str:
        if path not in self._cures:
            self._cures[path] = kept_whole(self.model, path)
        return self._cures[path]

    def _staged(self, record: CallTrace) -> Iterator[tuple[int, Call]]:
        """Yield every call with its stage."""
        s, last = 0, len(self.units) - 1
        for call in record.calls:
            if s < last:
                start = self.units[s + 1].start
                if start == call.target if call.module else start in call.attributes():
                    s += 1
            yield s, call
        if s != last:
            raise ValueError(
                f"{type(self.model).__name__} does not call {self.units[s + 1].start!r} for every micro-batch, or "
                "calls it in another order, so that stages cannot run one after the other; keep the whole model one "
                "stage: stages=pipeback.Splitting(leaves=[''])"
            )

    # -- from a record to what each segment does -----------------------------------------------------------------

    def _key(self, x: Any, way: CallWay) -> Key:
        training = self.model.training if way.training is None else way.training
        return key_of(tensors_of(x), training, self.held.number(way))

    def _take(self, record: CallTrace, x: Any, way: CallWay, known: Known, saved: bool = False) -> Any:
        """Teach the stages the work for micro-batches like x; return x with its mark. saved: it is that of a state."""
        key = self._key(x, way)
        if not saved:
            known = self._variants.marked(key, known)
        try:
            staged = self.ownership.lent(record, self._staged(record))
            if not all(self.ownership.able(s, call) for s, call in staged):
                raise ValueError(
                    f"{type(self.model).__name__}.forward calls its layers in another order than for the example, "
                    "so that stages cannot run one after the other; keep the whole model one stage: "
                    "stages=pipeback.Splitting(leaves=[''])"
                )
        except ValueError:
            if (able := self.ownership.staged(record.calls)) is None:
                if (call := self.ownership.unknown(record.calls)) is not None:
                    raise left_out(self.model, call.where, call.target) from None
                raise
            staged = self.ownership.lent(record, able)
        asked = {decision.number for decision in known.decisions}
        try:
            return self._learn(record, staged, asked, known, x, way)
        except LooksAlike:  # as a form with other shapes that a later stage does not see
            return self._learn(record, staged, asked, self._variants.apart(key, known), x, way)

    def _learn(
        self,
        record: CallTrace,
        staged: Sequence[tuple[int, Call]],
        asked: Collection[int],
        known: Known,
        x: Any,
        way: CallWay,
    ) -> Any:
        """Teach the stages this work; return x with its mark. asked: decisions that are evaluated at the push."""
        marked, names = known.marked(x), [segment.__label__ for segment in self.segments]
        key = self._key(marked, way)
        found = hand_along(record, staged, self.ownership, names, known.mark, asked)
        for s, (portion, forms) in enumerate(found):
            for copy in self._copies:
                copy[s].__learn__(key if s == 0 else (*key[:2], *forms), portion)  # type: ignore[operator]
        self._variants.add(self._key(x, way), key, known)
        return marked
