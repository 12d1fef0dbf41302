"""Outside calls: the calls of a pipeline whose loss is computed outside, between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from pipeback.pipeline.lifetime import Lifetime
from pipeback.pipeline.outside_loss import OutsideLoss
from pipeback.pipeline.saving import Saving
from pipeback.runtime.runners import Answer, Judge
from pipeback.stages.flight import Value


class OutsideCalls(Lifetime):
    """A pipeline that may have been built with `loss=None`."""

    _outside: OutsideLoss
    _saving: Saving

    def forward(self, x: Value, *, expected: int = 1) -> Value:
        """F of one micro-batch x (N, …) at every stage, for a loss that is computed outside (`loss=None`).

        Returns the model's output, detached from its graph and requiring a gradient, whose gradient goes to `backward`;
        or drop the micro-batch by `forget`. Over processes the last rank gets the output, the others None at once.
        expected: micro-batches until the next `step`, for methods that flush once per push; too many do no harm.
        Until `backward` or `forget`, `drain` and `state_dict` raise RuntimeError; where stages run as one, so do
        `wait`, `model` and a change of training mode, since other micro-batches are amid the stages.
        """
        return self._outside.forward_many([x], expected)[0]

    def forward_many(
        self, xs: Sequence[Value], *, expected: int = 1, judge: Answer | Judge | None = None
    ) -> list[Value]:
        """F of several micro-batches of one flush (see `together`), all at one stage before any at the next.

        So a stage is streamed once. Returns the output of each, as `forward`; give gradients to `backward_many`.
        judge: (n, output of xs[n]) -> gradient of its loss; then xs need not be of one flush: they follow each other
        through the stages, each but the last is judged where it leaves them, and the output of the last is returned;
        over processes the last rank alone judges, and gets an output. A `Judge` knows some gradients without autograd.
        """
        return self._outside.forward_many(xs, expected, judge)

    def one_push(self) -> AbstractContextManager[None]:
        """A context whose micro-batches are those of one push: options of optimizers, weights and hooks are looked at
        before the first of them, and `.grad` shows no gradients in between. So each takes less time in the event loop;
        with workers, and where stages run as one, it changes nothing.
        """
        return self._outside.one_push()

    def average(self) -> bool:
        """Before `step`: divide the gradients in `.grad` by the number of micro-batches that they are the sums of, so
        that who looks at them or clips them sees means. Returns whether that was done: with a method that flushes, on
        one device, without store and masters, where no stages run as one and no micro-batch waits for its backward.
        """
        return self._outside.average()

    def clip_averaged(self, norm: float | None = None, value: float | None = None) -> bool:
        """Between `average` and `step`: clip the gradients in `.grad` now, each stage's by itself, as an update does by
        `clip_norm`. Returns whether that was done: where `average` has made them means.
        """
        return self._outside.clip_averaged(norm, value)

    def renew_options(self) -> None:
        """Before `step`: make the updates of the micro-batches since the last step under the options that optimizers
        have now, and not under those of their forward; in one process, where no stages run as one.
        """
        self._outside.renew_options()

    def runs_ticks(self, xs: Sequence[Value], *, expected: int = 1) -> bool:
        """Prepare for micro-batches like these; return whether some stages run as one, so that `judge` gains speed."""
        return self._outside.runs_ticks(xs, expected)

    @property
    def runs_ahead(self) -> bool:
        """Whether stages that run as one have moved weights on by the time that `forward` returns, which a loop over
        single stages does in `step` or the next `forward`.
        """
        return self._outside.runs_ahead

    def together(self, count: int, *, expected: int = 1) -> bool:
        """Whether no update lies between the next `count` micro-batches. expected: as `forward` will be given it."""
        return self._outside.together(count, expected)

    def backward(self, gradient: Value = None) -> None:
        """B at every stage where it may run now, from the loss's gradient with respect to the output of `forward`.

        gradient: shaped like the output (for a tuple, None where the loss does not depend on a part), to whose type
        one of another real type is converted, as by torch; over processes None on all ranks but the last. One that does
        not fit is refused, and the micro-batch waits for another. Due updates are done by `step`, the next `forward`,
        or a call that quiesces.
        """
        self._outside.backward([gradient], needed=True)

    def backward_many(self, gradients: Sequence[Value]) -> None:
        """`backward` for the micro-batches of `forward_many`: all at one stage before any at the stage before it.

        gradients: one per micro-batch. None, or a tuple of Nones, drops it; over processes ranks without loss give it.
        """
        self._outside.backward(gradients, forget=not self._engine.ranks.several)

    def forget(self) -> None:
        """Drop the micro-batches of the last `forward`: no stage will run a backward or an update for them."""
        self._outside.forget()

    def step(self) -> None:
        """Do the updates that are due. A method that flushes once per push ends its flush here, as after a push."""
        self._outside.step(self._saving.commit_if_due)
