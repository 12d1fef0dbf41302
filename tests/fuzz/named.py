"""Every fault that a search over options once named, and how the fuzzer finds it when its mending is taken back.

One row per fault: what it was, in a few words; which mending is taken back (`tests/fuzz/reverts`); and what shows it
then, which is the random search (`SEARCH`), or programs of `tests/fuzz/faults` by their names, or both.
"""

from __future__ import annotations

from typing import NamedTuple

SEARCH = "the random search"


class Named(NamedTuple):
    """part: of the list. words: what it was. revert: of `REVERTS`. shown: `SEARCH`, names of `FAULTS`, or both."""

    part: str
    words: str
    revert: str
    shown: tuple[str, ...]


def _rows(part: str, *rows: tuple[str, ...]) -> list[Named]:
    return [Named(part, words, revert, tuple(shown)) for words, revert, *shown in rows]


_SUMS = "sums of gradients in .grad, where zero_grad and a backward of the user's reach them"
_COUNTS = "joined twins of an optimizer that counts"
_HOOKS = "hooks on stages that run as one"
_VIEWS = "vectorize: outputs that are not contiguous"
_ENDS = "vectorize: what torch makes of it ends training"
_NUMBERS = "functions of the weights are known by their numbers"
_ONE = "how gradients lie is told by a batch of one sample"

NAMED: list[Named] = [
    *_rows(
        "wrong numbers",
        ("optimizers that count in param_groups: each joined twin counts for itself", _COUNTS, SEARCH,
         "an optimizer that counts in its groups: each joined twin counts for itself"),
        ("optimizers that count on self", _COUNTS, SEARCH, "an optimizer that counts on itself"),
        ("states lose the counter of an optimizer", "a state without the counter of an optimizer", SEARCH,
         "the counter of an optimizer is lost on the way through a state"),
        ("model.zero_grad() before each push destroys sums of 1F1B", _SUMS, SEARCH,
         "zero_grad before a push destroys sums of 1F1B"),
        ("model.zero_grad() before each push destroys sums of 2BW", _SUMS, SEARCH,
         "zero_grad before a push destroys sums of 2BW"),
        ("model.zero_grad() before each push destroys sums of PipeMare with groups", _SUMS, SEARCH,
         "zero_grad before a push destroys sums of PipeMare"),
        ("a user's own backward() destroys sums of gradients", _SUMS, SEARCH,
         "a backward of the user's comes into sums of 2BW"),
        ("a replaced parameter is not noticed where a push has two micro-batches",
         "a weight that was replaced is not looked for", SEARCH),
        ("one of two ranks calls drain() alone", "a worker does not tell when it was drained",
         "one of two ranks drains alone"),
        ("rates changed on one rank", "a worker does not tell its rates", "one of two ranks has another rate"),
        ("methods that step themselves never call a subclass's step", "a step that a method never calls", SEARCH,
         "methods that step themselves never call a subclass's step"),
        ("methods that step themselves never call step hooks of SGD", "hooks of a step that a method makes itself",
         SEARCH,
         "methods that step themselves never call step hooks"),
        ("stages that run as one ignore hooks added later", _HOOKS, SEARCH,
         "stages that run as one ignore forward hooks that are added later"),
        ("stages that run as one ignore register_post_accumulate_grad_hook", _HOOKS, SEARCH,
         "stages that run as one ignore hooks on gathered gradients"),
        ("in bfloat16 stages are taken for alike whose constants differ by 3.6 %",
         "stages are told apart by closeness alone", SEARCH,
         "in bfloat16, stages that run as one are taken for alike although their constants differ"),
        ("the guard is evaded by autocast entered after the first push", "autocast makes no other form", SEARCH,
         "autocast that is entered after the first push evades the guard against functions of weights"),
        ("the guard is evaded by integer input", _NUMBERS, SEARCH,
         "integer input evades the guard against functions of weights"),
        ("the guard is evaded by another shape later", "a function of the weights that another shape has", SEARCH,
         "another shape evades the guard against functions of weights"),
        ("replicas=2 in one process with init= has other weights in each", "each replica has init= to itself", SEARCH,
         "replicas of a model with init= begin with other weights"),
    ),
    *_rows(
        "resume",
        ("stages=N of a followed model is cut by measured time", "stages=N is cut by the time that calls take",
         "stages=N is cut by measured time, so that a state is refused as another model's"),
        ("after a first micro-batch of one sample, resumed runs differ in the last bits", _ONE,
         "after one sample, a run that is resumed has other last bits"),
        ("after a first micro-batch of one sample, sgd differs from plain torch in the last bits", _ONE,
         "after one sample, gradients of a transposed output have other last bits than plain training"),
        ("a stage that begins to draw after the first push has no stream", "a stage that begins to draw later on",
         SEARCH, "a stage that begins to draw after the first push has no stream of its own"),
        ("loading into a model with other frozen weights raises after weights have changed",
         "a state of other frozen weights", SEARCH,
         "a state of a model with other frozen weights is found out after weights have changed"),
        ("a state of 300 stages takes minutes", "all names are looked at for each micro-batch",
         "what a state takes to load grows with the cube of the stages"),
    ),
    *_rows(
        "vectorize",
        ("crashes for Conv and ReLU at micro-batch 2", _ENDS, SEARCH, "vectorize crashes: convolutions of two samples"),
        ("crashes for GroupNorm and Conv", _ENDS, SEARCH, "vectorize crashes: group norms and convolutions"),
        ("crashes for Conv1d", _VIEWS, SEARCH),
        ("crashes for depthwise convolutions", _VIEWS, SEARCH, "vectorize crashes: depthwise convolutions"),
        ("crashes for a frozen weight", "vectorize: weights that are frozen", SEARCH,
         "vectorize crashes: a frozen weight"),
        ("crashes for an unused weight", "vectorize: weights without a gradient", SEARCH,
         "vectorize crashes: an unused weight"),
        ("crashes for a change in place first", "vectorize: a change in place first", SEARCH,
         "vectorize crashes: a change in place first"),
        ('crashes for stages="layer" of Linear and Tanh', "vectorize: a followed first stage is like the others",
         SEARCH,
         "vectorize crashes: Linear and Tanh of a followed model"),
        ("a first batch of 1 and later ones of 2 end training, and state_dict() is refused", _ENDS, SEARCH,
         "vectorize crashes: convolutions of one sample, then of two"),
        ("its memory grows with every new shape", "vectorize: memory for every form that ever came", SEARCH,
         "vectorize keeps memory for every form that ever came"),
    ),
    *_rows(
        "refused or raised wrongly",
        ("Linear and ReLU of width 1 to 4 at micro-batch 1 as a function of the weights", _NUMBERS, SEARCH,
         "narrow layers with ReLU at one sample are refused as functions of their weights"),
        ("modules called by keyword", "modules that are called by keyword", SEARCH,
         "modules that are called by keyword"),
        ("losses that use autograd.grad", "a loss that differentiates", SEARCH, "a loss that differentiates"),
        ("expanded buffers", "buffers are written into as a whole", SEARCH, "an expanded buffer"),
        ("Embedding(sparse=True) in small models", "steps of sparse gradients",
         SEARCH, "sparse gradients in a small model"),
        ("Embedding(sparse=True) with replicas", "replicas add up gradients as they lie", SEARCH,
         "sparse gradients with replicas"),
    ),
    *_rows(
        "process life",
        ("a forked child that pushes hangs", "a child of fork() is not refused",
         SEARCH, "a forked child that pushes hangs"),
        ("a forked child keeps a store locked", "a child of fork() keeps the lock", SEARCH,
         "a forked child keeps a store locked"),
        ("one bad batch closes the pipeline for good", "a bad batch is let in", SEARCH),
        ("KeyboardInterrupt closes the pipeline with the message `closed: ;`", "an interrupt has no words", SEARCH,
         "KeyboardInterrupt closes the pipeline with an empty message"),
        ('activations="host" leaks per pipeline dropped in flight', "what a graph packs leads back to its stage",
         SEARCH,
         "a pipeline with activations in host memory that is dropped in flight stays"),
        ("optimizer.state.clear() leaves cerebras predicting from the old velocity", "a velocity that was cleared",
         SEARCH, "after optimizer.state.clear() cerebras predicts from the old velocity"),
        ("load_state_dict of the model in flight ends in an autograd error", "weights that were written in flight",
         SEARCH, "load_state_dict of the model in flight ends in an autograd error"),
        ("eval() between pushes with workers takes effect at a random time", "eval() does not wait", SEARCH,
         "eval() between pushes with workers takes effect at a random time"),
    ),
    *_rows(
        "files and network",
        ("the health store listens on all interfaces: loopback on one host",
         "the store of the ranks listens everywhere", "on one host, the store of the ranks listens on all interfaces"),
        ("anybody who reaches the health store can end a run: a secret otherwise",
         "the store of the ranks has no secret", "a stranger who reaches the store of the ranks ends the run"),
        ("names with ../ or absolute paths in state.json are followed", "names in state.json are followed", SEARCH,
         "names in state.json that lead out of the folder are followed"),
        ("names with ../ or absolute paths in weight indexes are followed",
         "names in an index of weights are followed", SEARCH,
         "names in an index of weights that lead out of it are followed"),
        ("weights.save omits one name of tied weights", "one name of a tied weight", SEARCH,
         "weights.save leaves out a name of tied weights"),
        ("a missing version-*.json begins at zero without a word", "a store without its version begins anew", SEARCH,
         "a store whose last version is missing begins at zero without a word"),
        ("re-sealed `fetched` values hang a load", "a place that cannot be is looked for", SEARCH,
         "a state with a place that cannot be hangs a load"),
    ),
    *_rows(
        "options",
        ("skip_zeros without sparsity", "skip_zeros without sparsity", SEARCH,
         "skip_zeros without sparsity is accepted without effect"),
        ('balance="luck"', "words of options are not looked at", SEARCH, "a balance that is none is accepted"),
        ('check_finite="x"', "words of options are not looked at", SEARCH, "a check_finite that is none is accepted"),
        ("store=5 is an AttributeError", "types of options are not looked at", SEARCH,
         "a store that is none is an AttributeError"),
        ("momentum=1 with sc divides by zero", "a spike of momentum 1",
         SEARCH, "momentum 1 divides by zero in the spike"),
    ),
    *_rows(
        "fused",
        ("fused SGD fails at the first update of joined stages that have different histories",
         "fused steps of joined stages", SEARCH, "joined stages of other histories, with fused momentum SGD"),
    ),
]  # fmt: skip
