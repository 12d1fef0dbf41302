"""Mendings that the random search misses: each is taken back, and the search must find a program that shows it."""

from __future__ import annotations

from .revert import Revert, revert

# what torch makes of stages that run as one is no reason to run them as they are
_STRIDES = (
    ("y.clone() if alias else y.contiguous()", "y.clone() if alias else y"),
    ("return tuple(y.contiguous() for y in found)", "return found"),
)
_ENDS = "            except Exception as error:  # whatever", "            except Unfit as error:  #"

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
            "        if self._shown:\n            self.hide()\n"
            "        values, self.values = self.values, [None] * len(self.params)\n",
            "        values, self.values = [p.grad for p in self.params], [None] * len(self.params)\n"
            "        for p in self.params:\n            p.grad = None\n",
        ),
        call="zero_grad",
    ),
    "a weight that was replaced is not looked for": revert(
        "pipeline/model_check", ("        n = self._entries.changed()\n", "        n = None\n"), call="replace"
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
            "vectorized/tracing/capture": _STRIDES,
            "vectorized/tracing/graphs": (('{aten.view.default: "reshape"', '{aten.view.default: "view"'),),
            "vectorized/tracing/simplified_graph": (("node.target = aten.reshape.default", "pass"),),
        },
        {"runtime": {"vectorize": True}, "model": "depthwise"},
    ),
    "vectorize: a change in place first": revert(
        "vectorized/tracing/capture",
        ("[x.clone() for x in xs] if traits.clones else xs", "xs"),
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
        "stages/norm_check", ('args[0] if args else kwargs.get("input")', "args[0]"), model="named"
    ),
    "names in state.json are followed": revert(
        "checkpoint/folders",
        ('if name in ("", ".", "..") or {"/", os.sep, os.altsep} & set(name):', "if False:"),
        call="damaged",
    ),
    "a step that a method never calls": revert(
        "pipeline/option_checks",
        ("if method.steps_itself and replaced_step(opt):", "if False:"),
        method="sc",
        optimizer="halved",
    ),
    "hooks of a step that a method makes itself": revert(
        "stages/joint_optimizer",
        ("before, after = step_hooks(self._twin) if itself else ((), ())", "before, after = (), ()"),
        method="cerebras",
        call="listen",
    ),
    "stages are told apart by closeness alone": revert(
        "vectorized/making/verify",
        ('raise Unlike(f"{stage.label} computes something else than {stages[-1].label}")', "pass"),
        model="scaled",
        runtime={"vectorize": True},
    ),
    "autocast makes no other form": revert(
        "pipeline/rehearsals",
        ("for part in parts), accelerators.casting()", "for part in parts)"),
        method="pb-2",
        call="cast",
    ),
    "functions of the weights are known by their numbers": revert(
        "stages/stale_weights_check",
        (
            "_by_numbers(stage, value, target) if isinstance(stage.call, Compiled) else _watched(stage, value, target)",
            "_by_numbers(stage, value, target)",
        ),
        ("if found is None or _afresh(stage, value, target):", "if found is None:"),
        model="narrow",
        method="pb-2",
    ),
    "each replica has init= to itself": revert(
        "distributed/held_stages",
        ("if stage is not first and not self.ranks.several:", "if False:"),
        form="meta",
        options={"replicas": 2},
    ),
    "eval() does not wait": revert(
        "pipeline/train_modes",
        ("        if self.pending and id(module)", "        if False and id(module)"),
        model="dropping",
        runtime={"workers": 2},
        call="eval",
    ),
    "vectorize: what torch makes of it ends training": Revert(
        {
            "vectorized/stacks/stack": (_ENDS,),
            "vectorized/tracing/capture": _STRIDES,
            "vectorized/tracing/graphs": (('{aten.view.default: "reshape"', '{aten.view.default: "view"'),),
            "vectorized/tracing/simplified_graph": (("node.target = aten.reshape.default", "pass"),),
        },
        dict(model="depthwise", runtime={"vectorize": True}),
    ),
    "vectorize: weights without a gradient": Revert(
        {
            "vectorized/stacks/stack": (_ENDS,),
            "vectorized/making/verify": (
                ('            raise Unfit(f"their {names[m]} is not used, and gets no gradient")', "            pass"),
            ),
        },
        dict(model="unused", runtime={"vectorize": "auto"}),
    ),
    "vectorize: weights that are frozen": revert(
        "vectorized/tracing/product_gradients",
        (
            "    if others := [v for v in velocities if v not in whole]:",
            "    if [others := [v for v in velocities if v not in whole]]:",
        ),
        model="frozen",
        runtime={"vectorize": True},
        optimizer="momentum",
    ),
    "vectorize: a followed first stage is like the others": revert(
        "vectorized/making/verify",
        ("    like = stages[-1].module", "    like = stages[0].module"),
        ("            of_inputs = list(wanted[: len(xs)])", "            pass"),
        model="linear",
        form="followed",
        runtime={"vectorize": True},
    ),
    "vectorize: memory for every form that ever came": revert(
        "vectorized/stacks/stack",
        ("idle[: max(0, len(busy) + len(idle) - KINDS)]", "idle[:0]"),
        model="linear",
        runtime={"vectorize": True},
        call="forms",
    ),
    "buffers are written into as a whole": revert(
        "tensors/layout",
        ("    if tensor.layout is torch.strided and 0 in tensor.stride():", "    if False:"),
        model="spare",
        call="reload",
    ),
    "steps of sparse gradients": revert(
        "stages/team",
        ("strided = there and {*map(_LAYOUT, grads)} == {torch.strided}", "strided = there"),
        model="sparse",
    ),
    "replicas add up gradients as they lie": revert(
        "stages/gradients",
        ("torch.zeros_like(p) if g is None else dense(g)", "torch.zeros_like(p) if g is None else g"),
        model="sparse",
        options={"replicas": 2},
    ),
    "a child of fork() is not refused": revert(
        "streaming/fork_guard", ("    if os.getpid() != process:", "    if False:"), runtime={"workers": 2}, call="fork"
    ),
    "a child of fork() keeps the lock": Revert(
        {
            "streaming/fork_guard": (("        store.unlocked()", "        pass"),),
            "streaming/disk_store": (("            fcntl.flock(self._lock, fcntl.LOCK_UN)", "            pass"),),
        },
        {"runtime": {"store": "disk"}, "call": "reopen"},
    ),
    "an interrupt has no words": revert(
        "pipeline/closed_message",
        ("    if isinstance(error, Exception):", "    if True:"),
        ("str(error) or name", "str(error)"),
        call="interrupt",
    ),
    "what a graph packs leads back to its stage": revert(
        "stages/offload",
        (
            "self.label, self.device = stage.label, stage.device",
            "self.of, self.label, self.device = stage, stage.label, stage.device",
        ),
        runtime={"activations": "host"},
        options={},
        call="drop",
    ),
    "names in an index of weights are followed": revert(
        "weights", ('if Path(file).is_absolute() or ".." in Path(file).parts:', "if False:"), call="export"
    ),
    "one name of a tied weight": revert(
        "weights",
        ("by_tensor.setdefault(id(tensor), [])", "by_tensor.setdefault(hash(name), [])"),
        model="tied",
        call="export",
    ),
    "a store without its version begins anew": revert(
        "checkpoint/commits",
        ("elif any(committed for _, (committed, _), _ in everywhere):", "elif False:"),
        runtime={"store": "disk"},
        call="reopen",
    ),
    "a place that cannot be is looked for": revert(
        "runtime/loop_progress",
        ("if not least <= fetched <= least + updated:", "if False:"),
        method="pb-2",
        call="damaged",
    ),
    "words of options are not looked at": revert(
        "pipeline/option_checks",
        ("    if not any(type(value) is type(word)", "    if not words and not any(type(value) is type(word)"),
        odd=True,
    ),
    "types of options are not looked at": revert(
        "pipeline/option_checks", ("    if not isinstance(value, types) or (", "    if False and ("), odd=True
    ),
    "skip_zeros without sparsity": revert(
        "pipeline/arguments", ("if self.skip_zeros and self.sparsity is None:", "if False:"), odd=True
    ),
    "a spike of momentum 1": revert(
        "methods/momentum", ("horizon if momentum == 1 else ", ""), method="sc", optimizer="undamped"
    ),
}
