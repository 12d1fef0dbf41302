"""The place of a streamed stage: a worker moves its parameters while whoever pushes looks whether they are in place."""

import sys
from threading import Event, Thread

import torch
from torch import nn

from pipeback.stages.device_slot import DeviceSlot


def test_parameters_are_in_place_whenever_somebody_looks():
    slot = DeviceSlot([nn.Parameter(torch.ones(3)) for _ in range(20)], torch.device("cpu"), None)
    done, interval = Event(), sys.getswitchinterval()

    def move():
        while not done.is_set():
            slot.arrive()
            slot.leave()

    sys.setswitchinterval(1e-6)
    mover = Thread(target=move)
    mover.start()
    try:
        assert all(slot.intact() for _ in range(500))
    finally:
        done.set()
        mover.join()
        sys.setswitchinterval(interval)


def test_a_parameter_that_somebody_moved_is_not_in_place():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    slot = DeviceSlot(weights, torch.device("cpu"), None)
    weights[1].data = torch.zeros(3)
    assert not slot.intact()
