"""Captured step: a `training_step` of plain code as two graphs, which stand for it at most slices of a batch.

Running Python and autograd takes longer than a small stage does; a graph of operators takes a fraction. The graphs are
made from one slice, and run beside `training_step` at every slice of that batch. They stand for it from the next batch
on if all numbers are equal to the bit, and as long as batches have the same form and all that `training_step` reads
beside its batch is as it was. At the first slice of every batch they are compared again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning import step_checks
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
from pipeback.lightning.micro_batches import Said
from pipeback.lightning.plain_code import PlainCode
from pipeback.lightning.plain_values import NotPlain, told
from pipeback.lightning.seen_batches import check_classes, form_of, tensors_of
from pipeback.lightning.step_graphs import StepGraphs
from pipeback.lightning.suspended_step import TorchModes
from pipeback.private import dispatch_modes, function_modes, hook_tables, listened
from pipeback.tensors.structures import parts

Slice = tuple[Any, int]  # and its samples
Pair = tuple[Any, Any]  # what `training_step` computes, and what a graph does
FEW = 4  # slices of a batch for which nothing is gained
SEVERAL = 4  # forms of batches, as of texts in several lengths, for which graphs are kept
RARELY = 100  # batches for which further graphs are to last, since it takes as long as some batches to make them
_STOOD = (
    "training_step computes something else in this batch than the graph that stood for it before, so it runs for every "
    "micro-batch from now on, as it would from the start with PipelineStrategy(vectorize=False); in earlier batches, "
    "all micro-batches but the first and the last may have had another loss than training_step computes"
)
_NOBODY = nn.Module()
_DEFAULT_DEVICE = "torch.utils._device"  # where its mode is made, which stays once there was one
_OTHER = "computes something else when it runs as a graph"
_DIFFERS = "reads what differs from batch to batch, or gets batches whose forms do"


class CapturedStep:
    """Makes the graphs of the `training_step` of `module`, and tells which batches they stand for it in."""

    def __init__(self, found: TrainedModule, module: LightningModule) -> None:
        self.found, self.module = found, module
        self.why: str | None = None  # why it is not captured; goes on after "it"
        self.learns = False  # whether slices of this batch are to be shown
        self._code: PlainCode | None = None
        self._seen: list[Any] = []  # what the last batches read, and their forms
        self._made: list[tuple[Any, StepGraphs]] = []  # for which of these
        self._making: StepGraphs | None = None
        self._batches = self._times = self._differs = 0  # how often it was asked, learned, and nothing was as before

    @property
    def told(self) -> dict[str, str]:
        """What stands for `training_step`, and why nothing does; nothing is said before that is known."""
        why = self.why or (_DIFFERS if self._differs > SEVERAL and not self._made else None)
        if why is not None:
            return {"training_step": f"runs for every micro-batch: it {why}"}
        return {"training_step": "a graph stands for it"} if self._made else {}

    def ready(self, cut: Sequence[Slice], given: Given) -> StepGraphs | None:
        """Return the graphs that stand for `training_step` in this batch; None: it runs itself. given: its call."""
        self.learns = False
        if self.why is not None or len(cut) < FEW or self._watched():
            return None
        try:
            return self._known(cut, given)
        except NotPlain as error:
            self.why = str(error)
        except Exception as error:  # what is looked at is the user's, and may raise any error: it runs as it is
            self.why = f"cannot be looked at: {type(error).__name__}: {error}"
        self.learns = False
        return None

    def _known(self, cut: Sequence[Slice], given: Given) -> StepGraphs | None:
        now = self._now(cut, given)
        for known, graphs in self._made:
            if known == now:
                return graphs
        self._batches += 1
        before = now is not None and now in self._seen
        self.learns = before and self._times < SEVERAL + self._batches // RARELY
        self._times += self.learns
        self._differs = 0 if before else self._differs + 1
        if self.learns:  # what it reads and calls may be other code by now
            self._code = None
            now = self._now(cut, given)
        self._seen = [*self._seen, now][-SEVERAL:]
        self._making = None
        return None

    def learn(
        self, given: Given, modes: TorchModes, question: Any, output: Any, loss: Tensor, said: Sequence[Said]
    ) -> None:
        """Make the graphs from the first slice of a batch, and compare them with what `training_step` did at a slice.

        question: the input of the pipeline. said: what was logged after the model.
        """
        try:
            graphs = self._making
            if graphs is None:
                check_classes(output)
                graphs = StepGraphs(self.found, self.module, self._model, given, output, modes)
                self._making, self._made = graphs, [*self._made, (self._seen[-1], graphs)][-SEVERAL:]
            pairs = [*_beginnings(graphs, given.batch, question), *_ends(graphs, given.batch, output, loss, said)]
            if not all(_same(a, b) for a, b in pairs):
                raise NotPlain(_OTHER)
        except NotPlain as error:
            self.why = str(error)
        except Exception as error:  # the user's code or torch may raise any error: it runs as it is
            self.why = f"cannot be written as a graph: {str(error).strip().partition(chr(10))[0]}"
        if self.why is not None:
            self.learns, self._made = False, []

    def begins(self, graphs: StepGraphs, batch: Any, question: Any) -> bool:
        """Whether graphs that stand for `training_step` call the model as it has done at a slice itself.

        If not, a warning says so, and no graph stands for it from now on. batch: that of the slice.
        """
        return self._stands(lambda: _beginnings(graphs, batch, question))

    def ends(self, graphs: StepGraphs, batch: Any, output: Any, loss: Tensor, said: Sequence[Said]) -> bool:
        """Whether they compute of the output of the model what it has computed; else as `begins`."""
        return self._stands(lambda: _ends(graphs, batch, output, loss, said))

    def _stands(self, pairs: Callable[[], Iterable[Pair]]) -> bool:
        try:
            if all(_same(a, b) for a, b in pairs()):
                return True
        except Exception:  # such as an index out of range, which stays unseen where it is not used
            pass
        self.why, self._made = _OTHER, []
        warnings.warn(_STOOD, stacklevel=2)
        return False

    @property
    def _model(self) -> nn.Module:
        """The module that `training_step` calls to go forward."""
        step = self.found.step
        if step is None:
            return self.found.module
        if step.single is None:
            raise NotPlain("calls several modules with weights")
        return step.called[step.single]

    def _now(self, cut: Sequence[Slice], given: Given) -> Any:
        """What a batch reads and its form: if they are as before, the graphs of before compute the same."""
        if self._code is None:
            if self.found.step is not None and not self.found.step.known:
                return None
            self._code = PlainCode(self.module, "training_step", self._model)
        if any(hook_tables(self._model)):
            raise NotPlain("calls a model with hooks")
        slices = [tensors_of(batch) for batch, _ in cut[:-1]]  # the last one runs itself
        if not all(type(t) is Tensor and not t.requires_grad for tensors in slices for t in tensors):
            raise NotPlain("gets batches with tensors of other classes, or that need gradients")
        shapes, *others = ([(t.shape, t.dtype, t.device) for t in tensors] for tensors in slices)
        form = form_of(cut[0][0])
        if any(other != shapes for other in others) or any(form_of(b) != form for b in _with_more(cut[1:-1])):
            return None
        asked = [given.rest[n - 1] if n <= len(given.rest) else given.named for n in sorted(self._code.arguments)]
        return self._code.reads(), told(asked), form, shapes, TorchModes.now()

    @staticmethod
    def _watched() -> bool:
        """Whether somebody watches what Python does."""
        others = [mode for mode in function_modes() if type(mode).__module__ != _DEFAULT_DEVICE]
        return bool(torch.is_anomaly_enabled() or dispatch_modes() or others) or listened(_NOBODY) is not None


def _with_more(cut: Sequence[Slice]) -> list[Any]:
    """Slices in which not only tensors stand; the structure around tensors is the same in all."""
    return [batch for batch, _ in cut if not all(isinstance(part, Tensor) for part in parts(batch))]


def _beginnings(graphs: StepGraphs, batch: Any, question: Any) -> list[Pair]:
    """What the model is called with: by `training_step`, and by graphs. batch: that of the slice."""
    return [*zip(tensors_of(question), tensors_of(graphs.head(tensors_of(batch))), strict=True)]


def _ends(graphs: StepGraphs, batch: Any, output: Any, loss: Tensor, said: Sequence[Said]) -> list[Pair]:
    """What is computed of the output of the model, likewise."""
    found = graphs.tail(output, tensors_of(batch))
    gradients = step_checks.gradients(step_checks.held(output))
    both = (g if isinstance(g, tuple) else (g,) for g in (gradients, found[1]))
    names = zip([name for name, _ in said], [call.name for call in graphs.logged], strict=True)
    values = zip((loss, *(value for _, value in said)), (found[0], *found[2]), strict=True)
    return [*names, *values, *zip(*both, strict=True)]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
