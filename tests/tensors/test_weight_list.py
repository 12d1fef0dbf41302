"""Weights that are set aside: lists that follow each other in a strip are one vector, and others stay apart."""

import torch

from pipeback.tensors.weight_list import SCRATCH, WEIGHTS, Arena, runs_of, set_aside


def strip():
    arena = Arena([torch.empty(3), torch.empty(2, 2), torch.empty(5), torch.empty(1)])
    return arena, [arena.room(WEIGHTS, n, 1) for n in range(4)]


def test_neighbours_in_a_strip_are_one_vector():
    arena, (a, b, c, d) = strip()
    loose = [torch.zeros(2), torch.zeros(3)]
    assert [len(t) for t in runs_of([a, b])] == [32]  # 64 bytes each
    assert len(runs_of([a, b, c, d])) == 1
    assert len(runs_of([a, c, d])) == 2 and len(runs_of([b, a])) == 2
    assert len(runs_of([a, arena.room(SCRATCH, 1, 1)])) == 2  # another room
    found = runs_of([a, b, loose, c, d])
    assert len(found) == 4 and found[1] is loose[0] and found[2] is loose[1]
    assert runs_of([]) == []


def test_what_is_set_aside_is_put_back():
    _, (a, b, c, d) = strip()
    loose = [torch.arange(3.0)]
    for n, some in enumerate((a, b, c, d)):
        some[0].fill_(n)
    back = set_aside([a, b, loose, d])
    for some in (a, b, c, d, loose):
        some[0].fill_(7)
    back()
    assert [float(some[0].flatten()[0]) for some in (a, b, c, d)] == [0, 1, 7, 3]
    assert loose[0].tolist() == [0, 1, 2]
