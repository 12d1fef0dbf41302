"""Engine: runs the stages of a pipeline. It lets micro-batches in, and closes the pipeline when something fails."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.distributed.rank_runner import RankRunner
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.errors import RankError, StageError
from pipeback.pipeline.arguments import Clipping
from pipeback.pipeline.build import Built, StoreUse, telling
from pipeback.pipeline.closed_message import AMID, closed, otherwise
from pipeback.pipeline.grad_modes import recording
from pipeback.pipeline.kept_states import KeptStates
from pipeback.pipeline.loss_watch import LossWatch
from pipeback.pipeline.micro_batches import MicroBatcher
from pipeback.pipeline.model_check import ModelCheck
from pipeback.pipeline.observers import Observers
from pipeback.pipeline.parameter_groups import check_groups
from pipeback.pipeline.progress import Progress
from pipeback.pipeline.push_autocast import PushAutocast
from pipeback.pipeline.rehearsals import Rehearsals, Relay
from pipeback.pipeline.replica_sync import ReplicaSync
from pipeback.pipeline.stacking import Stacking
from pipeback.pipeline.start import start
from pipeback.pipeline.train_modes import OTHERWISE, CallLock, Modes
from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import EventLoop, PushLoop, Runner, Threads, weakly
from pipeback.runtime.tick_loop import TickLoop
from pipeback.runtime.undo import Dropped
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.judged_output import OWN_LOSS
from pipeback.stages.stage import Stage
from pipeback.streaming import fork_guard

Then = Callable[[], object]  # what is done last in a call


class Engine:
    """Runs the stages that were built.

    lock: one caller at a time. error: what has closed the pipeline. runtime: None before the first push. amid: calls
    that cannot be done while a micro-batch waits for its gradient from outside. pushed: micro-batches of the last push,
    and samples of its first one. current: the optimizers' options at the last push. threads: whether stages run in
    other threads or processes. kept: states to go back to; None: there are none.
    """

    def __init__(self, built: Built) -> None:
        options = built.options
        self.split, self.method, self.delays = built.split, built.method, built.delays
        self.optimizers, self.holding, self.setting = built.optimizers, built.holding, built.setting
        self.stages, self.model, self.traced = self.holding.stages, self.split.model, self.split.program
        self.size, self.by_samples = options.micro_batches.size, options.micro_batches.weights == "samples"
        self.outside, self._compile = options.loss is None, options.compile
        self.amid: Collection[str] = ()
        self._intact = ModelCheck(self.model, self.stages, self.traced is None)
        self._followers = ReplicaSync(self.holding.everywhere)
        self.threads = options.threads is not None or built.replicas > 1 or self.ranks.several
        inline = None if self.threads or self.outside else self.method
        self.entrance = MicroBatcher(self.traced, self.holding.everywhere, inline)
        self.casting = PushAutocast(self.holding.everywhere, options.debug.order)
        self._stacking, self.current = Stacking(built), Options(self.optimizers, 0)
        weights = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        self._rehearsals = Rehearsals(self.holding, self.delays, weights, options.debug.weight_functions == "warn")
        self.observing, self.losses, self.progress = Observers(), LossWatch(options.debug.stop_at_nan), Progress()
        self.error: BaseException | None = None
        self.kept: KeptStates | None = None
        apart = bool(options.vectorize) or options.tensor.size > 1
        self._otherwise = otherwise(self.outside, apart, self.holding.store)
        self.runtime: Runner | None = None
        self._finalizer: Any = None  # stops the threads of a pipeline that nobody holds
        self.lock, self._process = CallLock(self.split.rest), os.getpid()  # not in a child of fork
        self.modes = Modes(self.settable(), self.lock, self._settle)
        self.arrived, self.pushed, self._affordable = 0, (0, 0), 0  # the last: of a push that is known to fit the store
        self.release = StoreUse(self, self.holding.store)

    @property
    def ranks(self) -> Ranks | SingleProcess:
        """The processes of the pipeline. Loading a state after an error makes them meet anew."""
        return self.holding.ranks

    @property
    def vectorized(self) -> dict[str, str]:
        """For each stack of similar stages, whether they run as one."""
        return self._stacking.told

    @property
    def loops(self) -> list[Loop]:
        """Those of this process; none before the first push."""
        return [] if self.runtime is None else self.runtime.loops

    @property
    def owner(self) -> list[int]:
        """The worker of each stage."""
        return self.holding.balance() if self.runtime is None else self.runtime.owner

    # -- training ------------------------------------------------------------------------------------------------

    def push(self, x: Value, y: Any, then: Then) -> Tensor:
        """As `Pipeline.push`. then: called before the loss is read."""
        with self.lock, torch.enable_grad():
            if self.outside:
                raise RuntimeError(
                    "push needs a loss, but this pipeline has loss=None; call forward and backward, or build it with a "
                    f"loss: with {OWN_LOSS} where the model computes it from labels in x"
                )
            batches = self.batches(x, y)  # the data are the same on all ranks, each of which raises an error by itself
            with telling(self.ranks):
                self.ready(batches)
                if self.kept is not None:
                    self.kept.note(batches)
            first = self.arrived
            try:
                losses = self.do(partial(self.let_in, batches), harmless=(Dropped,))
            except Dropped as dropped:
                self.arrived = self.loops[0].order.arrived
                self.progress.pushes -= self.arrived == first
                if isinstance(dropped.__cause__, KeyboardInterrupt):
                    raise KeyboardInterrupt(str(dropped)) from dropped.__cause__
                raise
            then()
            loss: Tensor = losses()
            handed = loss if self.kept is None else self.kept.handed(loss)
            with telling(self.ranks):
                self.losses.see(self.progress.pushes - 1, loss)
            return handed

    def let_in(self, batches: Sequence[Batch]) -> Callable[[], Tensor]:
        """Push micro-batches that the stages know; returns what gives their mean loss."""
        assert self.runtime is not None
        first = self.arrived
        self.progress.push(batches)
        self.came(len(batches) // len(self.holding.everywhere))
        losses = self.runtime.push(first, batches, self.current)
        return partial(losses, [size for _, _, size in batches] if self.by_samples and len(batches) > 1 else None)

    def batches(self, x: Any, y: Any, size: int | None = None) -> Sequence[Batch]:
        """The micro-batches of a push. size: of each, where it is not the pipeline's."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError("push trains, which inference mode forbids; call it outside torch.inference_mode()")
        return self.entrance.batches(x, y, size or self.size, self.wait)

    def ready(self, batches: Sequence[Batch], expected: int | None = None) -> Runner:
        """Check everything and start the runtime before a micro-batch is let in. expected: micro-batches per push."""
        self.open()
        self._intact.check(lambda: self.runtime is None or self.do(self.runtime.wait))
        if self._followers.due:
            self._followers.follow(self.join, self.wait)
        if not self.current.current(self.optimizers):
            check_groups(self.stages, self.method, self.current)
            self.current = Options(self.optimizers, self.arrived)
        self.rehearse(batches)
        self.like(expected or len(batches) // len(self.holding.everywhere), batches[0][2])
        self._afford(*self.pushed)
        assert self.runtime is not None
        return self.runtime

    def like(self, micro_batches: int, samples: int) -> None:
        """Record that a push is so many micro-batches, the first one of so many samples."""
        self.pushed = micro_batches, samples

    def came(self, count: int) -> None:
        """So many further micro-batches are let in."""
        self.arrived += count
        self._followers.work()
        self.modes.pushed()

    def wait(self) -> None:
        """As `Pipeline.wait`."""
        with self.lock, recording():
            self.open("wait")
            if self.runtime is not None:
                harmless = () if isinstance(self.runtime, EventLoop) else (KeyboardInterrupt,)
                self._followers.follow(self.join, partial(self.do, self.runtime.wait, harmless=harmless))
            self.modes.done()
            if self.kept is not None:
                self.kept.rests()

    def _reach(self, done: Callable[[], bool]) -> None:
        """Do what was pushed until `done` says so; the rest stays in flight."""
        with self.lock, recording():
            self.open("reach")
            if isinstance(self.runtime, TickLoop):
                self.do(partial(self.runtime.go_on, done))

    def drain(self, then: Then) -> None:
        """As `Pipeline.drain`. then: called if something could be in flight."""
        with self.lock, recording():
            self.open("drain")
            if self.runtime is not None:
                self._followers.follow(self.join, partial(self.do, partial(self._rehearsals.drain, self.runtime)))
                self.ranks.meet("drain()")
                self.modes.done()
                if self.kept is not None:
                    self.kept.forget()
                then()

    def join(self) -> None:
        """Wait until no thread works on what was pushed."""
        if isinstance(self.runtime, Threads | RankRunner):
            self.do(self.runtime.join)

    def guard(self, meet: Callable[[], object]) -> None:
        """Meet the other ranks; an error of theirs is one of this pipeline."""
        with self.lock:
            self.do(meet, harmless=(KeyboardInterrupt,))

    def clip(self, norm: float | None, value: float | None) -> None:
        """As `Pipeline.clip`."""
        Clipping(norm, value).check()
        self.setting.worker.update(clip_norm=norm, clip_value=value)
        with self.lock:
            if self.runtime is not None:
                self.do(partial(self.runtime.tell, lambda loop: loop.clip(norm, value)))

    # -- open and closed -----------------------------------------------------------------------------------------

    def open(self, what: str = "") -> None:
        """Raise RuntimeError if the pipeline is closed, if this is a child of fork, or if `what` cannot be done now."""
        if self._finalizer is not None or self.holding.store is not None:
            fork_guard.refuse(self._process)
        if self.error is not None:
            raise closed(self.error, self._otherwise) from self.error
        if what in self.amid:
            raise RuntimeError(AMID)
        self.holding.showing.check(what)

    def do(self, what: Callable[[], Any], harmless: tuple[type[BaseException], ...] = ()) -> Any:
        """Do it. An error closes the pipeline, since a wave may be half done, unless it is one of `harmless`."""
        try:
            with self.casting.off():
                return what()
        except BaseException as error:
            # an interrupt that has ended a thread is raised here, too
            if not isinstance(error, harmless) or (isinstance(self.runtime, Threads) and error in self.runtime.failure):
                if self.kept is not None:
                    self._otherwise = self.kept.recover(error)
                self.error = error
            raise

    def close(self, why: str = "close() was called") -> None:
        """As `Pipeline.close`. why: what the calls that come later say."""
        with self.lock:
            if os.getpid() != self._process:
                return
            if self.error is None and self.ranks.several:
                with suppress(Exception):  # then the others know it, too
                    self.kept.settle("close()") if self.kept is not None else self.wait()
            self.stop()
            self.ranks.leave()
            self.release()
            self.error = self.error or RuntimeError(why)

    def reopen(self) -> None:
        """Stop, because a state will be loaded; micro-batches in flight are lost."""
        if self.error is None and "wait" not in self.amid:
            with suppress(StageError, RankError):  # a worker has failed meanwhile, in what the state replaces
                self.kept.settle("load_state_dict()", warn=False) if self.kept is not None else self.wait()
        if self.error is None:
            with suppress(RankError):  # of another rank's worker
                self.do(partial(self.ranks.gather, None, "load_state_dict()"))  # nobody waits for a message any more
        self.stop()
        if self.kept is not None:
            self.kept.forget()
        if self.error is not None and isinstance(self.ranks, Ranks):
            self.holding.meet_again()
        self.error = None

    def check(self, plain: Mapping[str, Any]) -> None:
        """Raise ValueError if a state cannot go on in the stacks of this pipeline."""
        self._stacking.check(plain)

    def take_up(self, plain: Mapping[str, Any], current: Options) -> None:
        """Load the part of a state that belongs to no stage. current: the optimizers' options in it."""
        self.current, self.arrived = current, plain["arrived"]
        self.progress.take_up(plain)
        self._rehearsals.forget()
        if self.traced is not None:
            self.traced.know(plain.get("forms", ()), any(s["flights"] or s["messages"] for s in plain["stages"]))
        if plain["loops"]:
            self.holding.share_out(plain["seconds"])
            self._stacking.regroup(plain)
            self._stack()
            self.holding.lay()

    def remember(self) -> None:
        """Weights are as they should be: changes that the user wrote into them are taken in."""
        self._followers.remember()

    # -- the first micro-batch -----------------------------------------------------------------------------------

    def rehearse(self, batches: Sequence[Batch]) -> None:
        """Rehearse what has to be, and start with the first."""
        self.casting.take(self._stacking.on or self.setting.skewed, self.wait)
        if not (self._rehearsals.due(batches) or self._stacking.unseen(batches)):
            return
        if self.runtime is not None:
            if self.modes.unheard and self._rehearsals.set_otherwise:
                warnings.warn(OTHERWISE, stacklevel=5)
            self.do(self.runtime.wait)  # buffers and random state are borrowed and put back
        relay = self._relay if isinstance(self.runtime, RankRunner) else None
        anew = self._rehearsals.run(batches, relay) or bool(self._stacking.unseen(batches))
        sizes = anew and (self._stacking.on or self.setting.skewed)  # on all ranks
        if sizes:
            self._stacking.see(batches, relay)
        if self.runtime is None:
            self.holding.share_out()
        if sizes:
            self._stacking.choose()
            self._fit_stacks(batches, relay)
            self._rehearsals.look()
        if self.runtime is None:
            self.holding.lay()
            self.start()
        self._rehearsals.done(batches)

    def _fit_stacks(self, batches: Sequence[Batch], relay: Relay | None) -> None:
        """Keep those stacks of similar stages that can run as one for these micro-batches."""
        changed = self._stacking.fit(self.current)
        if self.runtime is None:
            self._stacking.meet()
            self._stack()
        else:  # the order of operations stays
            self.setting = self.setting._replace(stacks=self._stacking.stacks)
        if changed:
            for loop in self.loops:  # of a state that was taken up
                mine = [stack for stack in self.setting.stacks if stack.stages[0] in loop.worker.stages.values()]
                loop.worker.executor.use(mine)
            if self._compile:  # what is left compiles, and is checked, on its own
                self._rehearsals.whole(batches[0], relay)

    def _stack(self) -> None:
        """Take the stacks into the setting of the runtime; every rank calls this at the same time."""
        stacks = self._stacking.stacks
        skewed = any(self.ranks.gather(bool(stacks), "push()")) if self.ranks.several else bool(stacks)
        self.setting = self.setting._replace(stacks=stacks, skewed=skewed)

    def _relay(self, x: Value, part: Callable[[Sequence[Stage], Value], Value]) -> None:
        assert isinstance(self.runtime, RankRunner)
        part = self.casting.around(part)
        self.do(partial(self.runtime.relay, x, part, back=False, mb=None if self.kept is None else self.arrived))

    def _afford(self, micro_batches: int, samples: int) -> None:
        """Raise an error if a push of so many micro-batches exceeds the store's budgets."""
        store = self.holding.store
        if store is not None and store.budgets != (None, None) and micro_batches > self._affordable:
            from pipeback.plan.budget import check  # here, since most pipelines have no budget
            from pipeback.plan.survey import survey

            check(survey(self.holding, self.setting, samples, timed=False), micro_batches)
            self._affordable = micro_batches

    def start(self) -> list[Loop]:
        """Build the runtime for the stages that this process holds now; returns its loops."""
        self.runtime = start(self.holding, self.setting)
        if isinstance(self.runtime, EventLoop):
            self.runtime.loop.inline = self.kept is None  # one way to take back is enough
        if isinstance(self.runtime, TickLoop):
            self.runtime.reach, self.runtime.as_pushed = weakly(self._reach), self._rehearsals.as_pushed
        if not isinstance(self.runtime, EventLoop) or self.holding.store is not None:
            self._finalizer = weakref.finalize(self, _end, self.runtime, self.ranks, self._process)
        self.observing.started(self.loops)
        if not isinstance(self.runtime, PushLoop):
            self.modes.listen()
        return self.loops

    def stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self.runtime is not None:
            self.runtime.close()
        self.runtime, self.amid = None, ()
        self.modes.leave()

    def settable(self) -> Iterator[nn.Module]:
        """The modules whose training mode the user may set."""
        for module in (self.model, *(stage.module for stage in self.stages)):
            yield from module.modules()

    def _settle(self) -> None:
        """Called when the user is about to set a module to train or to evaluate."""
        if self.error is None and os.getpid() == self._process:
            self.wait()


def _end(runtime: Runner, ranks: Ranks | SingleProcess, process: int) -> None:
    if os.getpid() == process:  # a child of fork has no threads to end
        runtime.close()
        ranks.leave()
