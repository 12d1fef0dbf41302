"""Assumed device: a plan's loads on a device that is not here, by the FLOP and bytes that were counted here.

    F            FLOP/(efficiency·peak) + bytes moved/memory speed        as `planner.costs` has it for any layer
    B            twice as much, and F once more for what it recomputes
    fetch        weights/host link, and their bytes/disk speed            leave     gradients/host link
    update       what the optimizer moves/speed of the memory it is in

Products of 32-bit weights reach half of the peak, as they do in TF32.
"""

from __future__ import annotations

from dataclasses import replace

from pipeback.plan.bandwidth import Bandwidth
from pipeback.plan.survey import PlanInputs, StageBytes
from pipeback.planner.constants import best_for
from pipeback.planner.costs import Costs
from pipeback.planner.hardware import Cluster, Device
from pipeback.planner.layers import Layer
from pipeback.planner.models import Model

WIDE = 4  # bytes of a weight from which products reach half of the peak


def assumed(facts: PlanInputs, model: Model, device: Device) -> PlanInputs:
    """The same pipeline on this device. model: its stages, as `Model.measured` has them."""
    peak = device.flops / (2 if model.weight_bytes >= WIDE else 1)
    costs = Costs(Cluster(replace(device, flops=peak)), best_for(device.name, "none"))
    layers = model.elsewhere().layers
    stages = {s: _loaded(portion, layers[s], model, facts, costs) for s, portion in facts.stages.items()}
    host = device.host.speed
    speeds = Bandwidth(host, host, device.memory_speed, 0.0, device.disk_read, device.disk_write)
    return facts._replace(stages=stages, bandwidth=speeds, device_room=int(device.memory), assumed=device.name)


def _loaded(portion: StageBytes, layer: Layer, model: Model, facts: PlanInputs, costs: Costs) -> StageBytes:
    load, device = portion.load, costs.cluster.device
    seconds = costs.layer(layer, facts.samples * model.context, facts.samples, 1, "none")
    moved = 2 * (portion.optimizer + portion.trainable) + load.gradients  # states and weights are read and written
    resident = facts.kind == "device"
    update = moved / (device.memory_speed if resident else device.host_speed)
    opened = portion.newly / device.disk_read if facts.kind == "disk" else 0.0
    stored = portion.newly / device.disk_write if facts.kind == "disk" else 0.0
    placed = load.weights / device.host.speed + (portion.home / device.disk_read if facts.kind == "disk" else 0.0)
    return portion._replace(
        load=load._replace(
            forward=seconds.forward,
            backward=seconds.input_gradient + seconds.weight_gradient + (seconds.forward if load.repeat else 0.0),
            add=load.gradients / device.memory_speed,
            away=portion.waiting / device.host.speed,
            back=portion.waiting / device.host.speed,
            fetch=0.0 if resident else placed,
            ask=opened,
            leave=0.0 if resident else load.gradients / device.host.speed,
            update=update + opened + stored,
        )
    )
