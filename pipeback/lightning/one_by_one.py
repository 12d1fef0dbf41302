"""One by one: why the stages of a fit run one by one, although stages that are alike were to run as one.

Stages that run as one are ahead of `training_step`: while it has the output of one micro-batch, the stages before the
last have begun others. After a batch all of this is where it would have been. So hooks that are called amid a step, and
may look at gradients or weights there, are heard of here; hooks before and after a batch see nothing new.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from pipeback.lightning import step_hooks
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.strategy_options import StrategyOptions
from pipeback.stages.activations import recomputes

# hooks between the forward of a batch and its update
AMID = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)


def why(
    options: StrategyOptions,
    trainer: Trainer,
    module: LightningModule,
    found: TrainedModule,
    ranks: int,
) -> str | None:
    """Return why the stages of this fit run one by one whatever was asked for, and what to do; None: they need not.

    Raises ValueError where the user has asked for `vectorize=True` or `"cuda_graph"`.
    """
    reason = _reason(options, trainer, module, found, ranks) if options.vectorize else None
    if reason is not None and options.vectorize != "auto":
        raise ValueError(f'vectorize={options.vectorize!r}: {reason}, or vectorize="auto"')
    return reason


def _reason(
    options: StrategyOptions,
    trainer: Trainer,
    module: LightningModule,
    found: TrainedModule,
    ranks: int,
) -> str | None:
    kind = trainer.strategy.root_device.type
    if options.vectorize == "cuda_graph" and options.threads is not None:
        return f"CUDA graphs are of one thread, but workers={options.threads}; use workers=None"
    if options.vectorize == "cuda_graph" and kind != "cuda":
        return f'CUDA graphs need a GPU, but this fit is on {kind}; use Trainer(accelerator="gpu")'
    if options.vectorize == "cuda_graph" and ranks > 1:
        return f"CUDA graphs are of one device, and this fit has {ranks}; use vectorize=True"
    for name, value, plain in (
        ("tensor_parallel", options.tensor.size, 1),
        ("activations", options.activations, options.activations if recomputes(options.activations) else "device"),
        ("order", options.debug.order, "grouped"),
    ):
        if value != plain:
            return f"{name}={value!r} does not go with stages as one; use {name}={plain!r}"
    if options.streaming.sparsity is not None:
        return "sparse weights do not go with stages as one; leave sparsity= out"
    hook = next(step_hooks.overridden(trainer, module, AMID), None)
    return None if hook is None else f"{hook} may look at gradients or weights amid a step; leave that hook out"
