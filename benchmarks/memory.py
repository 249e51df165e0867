"""How much memory tensors take, counted rather than measured: the same number on every run."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """The most bytes at a time of storages that operators made in this context, or since `begin`.

    Of an operator's own scratch memory nothing is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.bytes = self._held = 0
        self._live: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._round = object()

    def _free(self, size: int, made_in: object) -> None:
        if made_in is self._round:
            self._held -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in given and storage not in self._live:
                self._live[storage] = size = storage.nbytes()
                self._held += size
                weakref.finalize(storage, self._free, size, self._round)
        self.bytes = max(self.bytes, self._held)
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
