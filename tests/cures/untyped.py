"""Messages with a cure in which no test of this folder is found, as the source has them; {} is what is filled in.

Those that are hardly more than what is filled in, such as "{} must be one of {}", are typed by test_cures.py all the
same, word by word; no test types the cures of the others yet.
"""

# ruff: noqa: E501

UNTYPED = frozenset(
    [
        "a tensor of layout {} does not travel between stages; use .to_dense()",
        "an object of {} stands in two places of what a module is given, and a stage would make two objects of it; pass it once, or give the path of that module in stages=pipeback.Splitting(leaves=[...])",
        "link: ranks {} and {} do not share memory (other hosts, or accelerators); use workers=pipeback.Processes(link='auto')",
        "mesh {} lacks rank {}, which builds a pipeline over it; give each rank the mesh that it is in",
        "pipeback works with lightning.pytorch, but this Trainer is of pytorch_lightning, another distribution with classes of its own; write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`",
        'process {} was forked from process {}, which built this pipeline and has its threads, its store and what is in flight; build a new Pipeline in the child, with a store in another folder, or start it by multiprocessing.get_context("spawn")',
        "rank {} has {} {}, rank 0 has {}; start the same script with the same options on every rank",
        "rank {} has {} {}, rank {} has {}; start the same script with the same options and versions on every rank",
        "torch.distributed runs with {} ranks, but the Trainer asks for {}; start as many, or let the Trainer start them",
        "{} does not go with {}={}; use {}{}",
        "{} is a {} tensor, which checkpoints do not hold; use dense tensors",
        "{} must be above 0{}, but is {}; for example {}",
        "{} must be one of {}, but is {}; for example {}({}={})",
        "{}.forward has taken {} branches for micro-batches of one form, and now another one: {} gave {}; keep decisions by values within one layer: give the path of the deciding module in stages=pipeback.Splitting(leaves=[...])",
        "{}: does not hold stage {}, but other ranks do; start as many ranks, workers and replicas as before, or give the store another folder",
        "{}: launcher='spawn' sends the LightningModule, its data and the callbacks to the processes of Trainer(devices=...). Define it at the top of a file (functools.partial instead of a lambda), or use PipelineStrategy(launcher='fork' or 'script'), or torchrun",
        "{}: the ranks hold no version in common; give the store an empty folder",
        "{}: {}, a Function of its own, changes a view in place (x.view(…), y[0], what a layer returns), and what torch keeps for it cannot be reached; give it a copy (x = x.clone() before), or drain() before saving",
        "{}: {}; what was committed last is whole, make room or give another folder and start again",
    ]
)
