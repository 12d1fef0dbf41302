"""Mendings that hand-written programs miss: forks, files, ranks, options and the like, which the search does not draw.

Which program shows which of them stands in `tests/fuzz/named.py`.
"""

from __future__ import annotations

from .revert import Revert, revert

# what torch makes of stages that run as one is no reason to run them as they are
_ENDS = "            except Exception as error:  # whatever", "            except Unfit as error:  #"

REPLAYED: dict[str, Revert] = {
    # wrong numbers
    "a worker does not tell when it was drained": Revert(
        {
            "runtime/link": (("data | (start % 251) << _START | told << _OPTIONS", "data | told << _OPTIONS"),),
            "runtime/loop": (('if (part["fresh"], part["start"]) != (whole["fresh"], whole["start"]):', "if False:"),),
        },
        {},
    ),
    "a worker does not tell its rates": revert("runtime/link", (" | told << _OPTIONS", "")),
    "a step that a method never calls": revert(
        "pipeline/option_checks",
        ("if method.steps_itself and isinstance(opt, torch.optim.SGD) and not torchs_step(opt):", "if False:"),
    ),
    "hooks of a step that a method makes itself": revert(
        "stages/joint_optimizer", ("before, after = step_hooks(twin) if itself else ((), ())", "before, after = (), ()")
    ),
    "stages are told apart by closeness alone": revert(
        "vectorized/verify",
        ('raise Unfit(f"{stage.label} computes something else than {stages[-1].label}")', "pass"),
    ),
    "autocast makes no other form": revert(
        "pipeline/rehearsals", ("for part in parts), accelerators.casting()", "for part in parts)")
    ),
    "functions of the weights are known by their numbers": revert(
        "stages/stale_weights_check",
        (
            "_by_numbers(stage, value, target) if isinstance(stage.call, Compiled) else _watched(stage, value, target)",
            "_by_numbers(stage, value, target)",
        ),
        ("if found is None or _afresh(stage, value, target):", "if found is None:"),
    ),
    "each replica has init= to itself": revert(
        "distributed/held_stages", ("if stage is not first and not self.ranks.several:", "if False:")
    ),
    "eval() does not wait": revert(
        "pipeline/train_modes", ("        if self.pending and id(module)", "        if False and id(module)")
    ),
    # resuming
    "stages=N is cut by the time that calls take": revert(
        "splitting/call_cost",
        ("self.done += BYTE * moved + OPERATION", 'self.done = __import__("time").perf_counter()'),
    ),
    "how gradients lie is told by a batch of one sample": revert(
        "stages/stage",
        ("if alike is None or tuple([leaf.shape for leaf in flight.leaves]) != alike:", "if alike is None:"),
        (
            "if flight.caught is None and self.index and not all(map(laid_alike, roots[first:], seeds[first:])):",
            "if False:",
        ),
    ),
    "all names are looked at for each micro-batch": revert(
        "stages/stage_state",
        (
            'tensors[name] for name in takewhile(tensors.__contains__, (f"{prefix}{n}" for n in count()))]',
            'tensors[f"{prefix}{n}"] for n in range(sum(name.startswith(prefix) for name in tensors))]',
        ),
    ),
    # vectorize
    "vectorize: what torch makes of it ends training": Revert(
        {
            "vectorized/stack": (_ENDS,),
            "vectorized/capture": (("y.contiguous() if isinstance(y, Tensor) else y", "y"),),
            "vectorized/graph_rewrites": (
                ('{aten.view.default: "reshape"', '{aten.view.default: "view"'),
                ("node.target = aten.reshape.default", "pass"),
            ),
        },
        {},
    ),
    "vectorize: weights without a gradient": Revert(
        {
            "vectorized/stack": (_ENDS,),
            "vectorized/verify": (
                ('            raise Unfit(f"their {names[n]} is not used, and gets no gradient")', "            pass"),
            ),
        },
        {},
    ),
    "vectorize: weights that are frozen": revert(
        "vectorized/graph_rewrites",
        (
            "    if others := [v for v in velocities if v not in whole]:",
            "    if [others := [v for v in velocities if v not in whole]]:",
        ),
    ),
    "vectorize: a followed first stage is like the others": revert(
        "vectorized/verify",
        ("    like = stages[-1].module", "    like = stages[0].module"),
        ("            wanted = (gx[r], *wanted[1:])", "            pass"),
    ),
    "vectorize: memory for every form that ever came": revert(
        "vectorized/stack", ("idle[: max(0, len(busy) + len(idle) - KINDS)]", "idle[:0]")
    ),
    # refused wrongly
    "buffers are written into as a whole": revert(
        "tensors/layout", ("    if tensor.layout is torch.strided and 0 in tensor.stride():", "    if False:")
    ),
    "steps of sparse gradients": revert(
        "stages/team",
        ("g is not None and g.layout is torch.strided for g in grads", "g is not None for g in grads"),
    ),
    "replicas add up gradients as they lie": revert(
        "stages/gradients",
        ("torch.zeros_like(p) if g is None else dense(g)", "torch.zeros_like(p) if g is None else g"),
    ),
    # process life
    "a child of fork() is not refused": revert(
        "streaming/fork_guard", ("    if os.getpid() != process:", "    if False:")
    ),
    "a child of fork() keeps the lock": revert("streaming/fork_guard", ("        store.unlocked()", "        pass")),
    "an interrupt has no words": revert(
        "pipeline/closed_message",
        ("    if isinstance(error, Exception):", "    if True:"),
        ("str(error) or name", "str(error)"),
    ),
    "what a graph packs leads back to its stage": revert(
        "stages/offload",
        (
            "self.label, self.device = stage.label, stage.device",
            "self.of, self.label, self.device = stage, stage.label, stage.device",
        ),
    ),
    # files and network
    "the store of the ranks listens everywhere": revert(
        "distributed/health/heartbeat", ("    if near:", "    if False:")
    ),
    "the store of the ranks has no secret": revert(
        "distributed/health/heartbeat",
        ("    return dist.PrefixStore(secret, store), f", "    return store, f"),
        ("        return dist.PrefixStore(secret, store)\n", "        return store\n"),
    ),
    "names in an index of weights are followed": revert(
        "weights", ('if Path(file).is_absolute() or ".." in Path(file).parts:', "if False:")
    ),
    "one name of a tied weight": revert(
        "weights", ("by_tensor.setdefault(id(tensor), [])", "by_tensor.setdefault(hash(name), [])")
    ),
    "a store without its version begins anew": revert(
        "checkpoint/commits", ("elif any(committed for _, (committed, _) in everywhere):", "elif False:")
    ),
    "a place that cannot be is looked for": revert(
        "runtime/loop", ("if not least <= fetched <= least + updated:", "if False:")
    ),
    # options
    "words of options are not looked at": revert(
        "pipeline/option_checks",
        ("    if not any(type(value) is type(word)", "    if not words and not any(type(value) is type(word)"),
    ),
    "types of options are not looked at": revert(
        "pipeline/option_checks", ("    if not isinstance(value, types) or (", "    if False and (")
    ),
    "skip_zeros without sparsity": revert(
        "pipeline/arguments", ("if self.skip_zeros and self.sparsity is None:", "if False:")
    ),
    "a spike of momentum 1": revert("methods/momentum", ("horizon if momentum == 1 else ", "")),
}
