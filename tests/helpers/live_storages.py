"""Live storages: the memory that is still there of all that torch has made since, whoever holds it.

Graphs hold saved tensors in C++, where nobody can look; but a storage that is gone says so.
"""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While this mode is on, notes every storage that an operation of torch makes, below autograd."""

    def __init__(self):
        super().__init__()
        self._found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            known = self._found.get(storage._cdata)
            if storage._cdata not in given and (known is None or known[0].expired()):
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), str(func)
        return result

    def alive(self):
        """{identity of a storage: its bytes}"""
        gc.collect()
        self._found = {key: some for key, some in self._found.items() if not some[0].expired()}
        return {key: size for key, (_, size, _) in self._found.items()}

    def made_by(self, key):
        """The operation that has made the storage, for messages."""
        return self._found[key][2]


def _storages(value):
    return [t.untyped_storage() for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
