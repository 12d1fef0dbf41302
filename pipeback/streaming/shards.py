"""Shards: splits a stage over the stores of the ranks of all R replicas, with 1/R of it in each.

    store of rank 0   A A · ·         a stage's run of bytes is cut at cache lines; a rank keeps the weights, the
    store of rank 1   · · B B         optimizer's and the method's state of its slice, as vectors
    fetch             A A B B         each rank reads its slice once; all gather the whole on every device
    update            g₀ + g₁ → A     each rank sends every owner the sums of its slice; the owner adds them in the
                      g₀ + g₁ → B     order of the ranks and steps its slice

Fetches and updates have a process group each, since each is started by a thread of its own. Both follow from the order
of operations alone, which is the same on every rank: a rank may only fetch when all others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeback.runtime.replicas import in_order, uneven
from pipeback.stages.joint_optimizer import separable
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.flat_buffer import FlatBuffer, Span, dense, places
from pipeback.tensors.layout import LINE

# optimizer state that is one number per parameter
SCALARS = {"step", "eta", "mu", "mu_product"}


class Collective(NamedTuple):
    """A process group, and a function that waits for its work or raises an error naming a rank that is silent."""

    group: dist.ProcessGroup
    wait: Callable[[dist.Work | None], None]
    nccl: bool = False  # whether its tensors are on the device; otherwise they are in host memory


class ReplicaGroup(NamedTuple):
    """One rank's view of the ranks that hold the same stages, one per replica."""

    fetching: Collective
    updating: Collective
    keeping: Collective  # a group in host memory, for states and norms
    stalled: Callable[[str], AbstractContextManager[None]]  # a context in which a thread waits for the other ranks

    def compare(self, given: int) -> None:
        """Raise `OtherBatch` unless all replicas were given as many micro-batches; each calls it before a fetch.

        Gloo ends the process if fetches of different length meet.
        """
        group, wait, nccl = self.fetching
        device = accelerators.mine() if nccl else torch.device("cpu")
        mine = torch.tensor([given], device=device)
        every = torch.empty(group.size(), dtype=mine.dtype, device=device)
        wait(dist.all_gather_into_tensor(every, mine, group=group, async_op=True))
        if any(other != given for other in every.tolist()):
            raise uneven(f"was given {given} micro-batches")


class Shard:
    """One rank's slice of a stage's run of bytes (`FlatBuffer`), and where all other slices are.

    column: the group of the ranks that share the stage, set once they have met.
    """

    def __init__(self, stage: int, named: Sequence[tuple[str, nn.Parameter]], index: int, count: int) -> None:
        self.stage, self.index, self.count = stage, index, count
        params = [p for _, p in named]
        begins, nbytes = places(params)
        self.share = -(-(nbytes // LINE) // count) * LINE  # bytes per rank
        self.names = {name: n for n, (name, _) in enumerate(named)}
        self.trained = [n for n, p in enumerate(params) if p.requires_grad]
        self.shapes = [p.shape for p in params]
        self.strides = [dense(p) for p in params]
        self.dtypes = [p.dtype for p in params]
        self.begins = begins
        self.column: ReplicaGroup | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the whole stage on a device."""
        return self.share * self.count

    def _joined(self) -> ReplicaGroup:
        assert self.column is not None
        return self.column

    # -- places --------------------------------------------------------------------------------------------------

    def span(self, n: int, rank: int | None = None) -> tuple[int, int]:
        """Return the elements [first, last) of parameter n, in the order of memory, of a rank (None: this one)."""
        rank = self.index if rank is None else rank
        size, number = self.dtypes[n].itemsize, self.shapes[n].numel()
        edges = (rank * self.share - self.begins[n]) // size, ((rank + 1) * self.share - self.begins[n]) // size
        low, high = (min(max(edge, 0), number) for edge in edges)
        return low, high

    def home(self, device: torch.device, *, pinned: bool) -> FlatBuffer:
        """Return memory for this rank's slice, whose `views` are vectors, some of them empty."""
        spans = []
        for n, (begin, dtype) in enumerate(zip(self.begins, self.dtypes, strict=True)):
            low, high = self.span(n)
            at = begin + low * dtype.itemsize - self.index * self.share if high > low else 0
            spans.append(Span(at, dtype, (high - low,), (1,)))
        return FlatBuffer(spans, self.share, device, pinned=pinned)

    def cut(self, n: int, whole: Tensor, rank: int | None = None) -> Tensor:
        """Return a rank's piece of a tensor shaped like parameter n, as a vector in the order of memory."""
        low, high = self.span(n, rank)
        return self._run(n, whole)[low:high]

    def _run(self, n: int, whole: Tensor) -> Tensor:
        if whole.stride() != self.strides[n]:
            laid = torch.empty_strided(self.shapes[n], self.strides[n], dtype=whole.dtype, device=whole.device)
            whole = laid.copy_(whole)
        return whole.detach().as_strided((whole.numel(),), (1,))

    def cut_state(self, stage: Stage) -> None:
        """Cut the initial state of an optimizer, such as Adagrad's, to this rank's slice."""
        for n, w in zip(self.trained, stage.weights, strict=True):
            state = stage.optimizer.state.get(w, {})
            for key, value in state.items():
                sliced = isinstance(value, Tensor) and self.number(f"optimizer/0/{key}") is not None
                if sliced and value.shape == self.shapes[n]:
                    state[key] = self.cut(n, value).clone()

    # -- fetch ---------------------------------------------------------------------------------------------------

    def gather(self, mine: Tensor, whole: Tensor) -> None:
        """Fill `whole` on the device from the slices in all ranks' stores; every rank calls this at the same moment."""
        group, wait, nccl = self._joined().fetching
        if not self.share:
            return
        if nccl or whole.device.type == "cpu":
            here = mine.to(whole.device, non_blocking=True)
            wait(dist.all_gather_into_tensor(whole, here, group=group, async_op=True))
            return
        host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
        wait(dist.all_gather_into_tensor(host, mine, group=group, async_op=True))
        whole.copy_(host, non_blocking=True)

    # -- update --------------------------------------------------------------------------------------------------

    def scatter(
        self, grads: Sequence[Tensor | None], number: float, version: int
    ) -> tuple[list[Tensor | None], float, int]:
        """Return this rank's slice of the gradient sums of all ranks, added in the order of the ranks.

        grads: of the trainable parameters. number: micro-batches (or samples) in them. version: updates before this
        one, on which all ranks must agree. It also returns the total number, and the bytes sent to other ranks.
        """
        if not grads:
            return [], number, 0
        group, wait, nccl = self._joined().updating
        there = [float(g is not None) for g in grads]
        kind = self.dtypes[self.trained[0]]
        nowhere = accelerators.mine() if nccl else torch.device("cpu")
        device = next((g.device for g in grads if g is not None), nowhere)
        told = [float(self.stage), float(version), number, *there]
        head = torch.tensor(told, dtype=torch.float64).view(kind).to(device)
        runs = [None if g is None else self._run(n, g) for n, g in zip(self.trained, grads, strict=True)]
        chunks: list[Tensor] = []
        sizes: list[int] = []
        for rank in range(self.count):
            spans = [self.span(n, rank) for n in self.trained]
            sizes.append(len(head) + sum(high - low for low, high in spans))
            chunks.append(head)
            for run, (low, high) in zip(runs, spans, strict=True):
                chunks.append(
                    torch.zeros(high - low, dtype=kind, device=device) if run is None else run[low:high].to(kind)
                )
        mine = sizes[self.index]
        given, taken = torch.cat(chunks), torch.empty(mine * self.count, dtype=kind, device=device)
        wait(dist.all_to_all_single(taken, given, [mine] * self.count, sizes, group=group, async_op=True))
        parts = list(taken.view(self.count, mine).unbind())
        heads = [part[: len(head)].clone().view(torch.float64).tolist() for part in parts]
        for rank, other in enumerate(heads):
            if other[:2] != told[:2]:
                raise RuntimeError(
                    f"replica {rank} is at update {other[1]:g} of stage {other[0]:g}, replica {self.index} at update "
                    f"{version} of stage {self.stage}; every replica must push the same number of micro-batches"
                )
        total = in_order([part[len(head) :] for part in parts])
        spans = [self.span(n) for n in self.trained]
        pieces = total.split([high - low for low, high in spans])
        flags = [any(other[3 + n] for other in heads) for n in range(len(grads))]
        sums = [
            piece.to(self.dtypes[n]) if flag else None
            for n, piece, flag in zip(self.trained, pieces, flags, strict=True)
        ]
        counted = 0.0
        for other in heads:
            counted += other[2]
        return sums, counted, (len(given) - mine) * given.element_size()

    def norm(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the Euclidean norm over all owners' slices, whose squares are added in the order of the ranks."""
        group, wait, _ = self._joined().keeping
        square = torch.zeros((), dtype=torch.float64, device="cpu")
        for g in grads:
            if g is not None:
                square += torch.linalg.vector_norm(g).double().square().cpu()
        squares = torch.empty(self.count, dtype=torch.float64, device="cpu")
        wait(dist.all_gather_into_tensor(squares, square.view(1), group=group, async_op=True))
        return in_order(list(squares.unbind())).sqrt()

    # -- state ---------------------------------------------------------------------------------------------------

    def number(self, name: str, tensor: Tensor | None = None) -> int | None:
        """Return the parameter of which `name`, a tensor of a state (see `stage_state`), keeps a slice; else None."""
        kind, _, rest = name.partition("/")
        if kind == "weight":
            return self.names[rest]
        if kind == "optimizer":
            n, _, key = rest.partition("/")
            return None if key in SCALARS else self.trained[int(n)]
        if kind in ("method", "version") or (kind == "flight" and rest.split("/")[1] == "used"):
            return self.trained[int(rest.rpartition("/")[2])]
        return None

    def whole(self, tensors: Mapping[str, Tensor], keep: Callable[[str], bool]) -> dict[str, Tensor]:
        """Return a stage's state with whole tensors in place of this rank's pieces; every rank of the column calls it.

        keep: whether this rank wants a tensor, by name. Tensors come one after the other, so the others are freed soon.
        """
        found = {}
        for name, tensor in tensors.items():
            n = self.number(name)
            value = tensor if n is None else self._collected(n, tensor)
            if keep(name):
                found[name] = value
        return found

    def _collected(self, n: int, piece: Tensor) -> Tensor:
        group, wait, _ = self._joined().keeping
        spans = [self.span(n, rank) for rank in range(self.count)]
        most = max(high - low for low, high in spans)
        padded = torch.zeros(most, dtype=piece.dtype, device="cpu")
        padded[: len(piece)].copy_(piece)
        every = torch.empty(self.count * most, dtype=torch.uint8 if not most else piece.dtype, device="cpu")
        if most:
            wait(dist.all_gather_into_tensor(_raw(every), _raw(padded), group=group, async_op=True))
        whole = torch.empty_strided(self.shapes[n], self.strides[n], dtype=piece.dtype, device="cpu")
        run = whole.as_strided((whole.numel(),), (1,))
        for rank, (low, high) in enumerate(spans):
            run[low:high] = every[rank * most : rank * most + high - low]
        return whole

    def pieces(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's pieces of a state, which are cut on access; tensors that are pieces already stay."""
        return _Pieces(self, tensors)

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is shaped like this rank's piece of the parameter."""
        low, high = self.span(self.names[name])
        return tensor.shape == (high - low,)


class _Pieces(Mapping[str, Tensor]):
    def __init__(self, shard: Shard, whole: Mapping[str, Tensor]) -> None:
        self._shard, self._whole = shard, whole

    def __getitem__(self, name: str) -> Tensor:
        tensor, n = self._whole[name], self._shard.number(name)
        if n is None:
            return tensor
        low, high = self._shard.span(n)
        # a vector of this length is the piece already, or a whole parameter that lies in one slice
        return tensor if tensor.shape == (high - low,) else self._shard.cut(n, tensor).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def share_out(stages: Sequence[Stage], index: int, count: int, sparsity: object) -> None:
    """Split every stage's weights over the replicas' stores; this rank belongs to replica `index`.

    Raises ValueError, naming the cure, for optimizers that do not work entry by entry, and for sparse training.
    """
    if sparsity is not None:
        raise ValueError(
            "sparsity: a store splits weights over the ranks of the replicas, but not sparse ones; use store=None, or "
            "one replica"
        )
    for stage in stages:
        if not separable(stage.optimizer):
            raise ValueError(
                f"store: {type(stage.optimizer).__name__} of {stage.label} may look at whole matrices, but every "
                "replica's store keeps a slice of them; use one of torch.optim's elementwise ones, such as SGD or "
                "AdamW, or store=None, or one replica"
            )
        stage.home.divide(Shard(stage.index, list(stage.module.named_parameters()), index, count))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
