"""Costs: seconds of a layer's operations on a device, and of what devices exchange.

With P the device's peak, T the tokens of a micro-batch, h the width, both per device, and constants in italics of
`constants`:

    F   products/(efficiency·P)·(1 + small_tokens/T)·(1 + small_width/h) + attention/(efficiency·P)
        + (activation_moves·kept + score_moves·scores)/memory speed + reductions
    I   the same, with twice the attention       W   the products alone
    R   what is recomputed: F, or of it attention and scores
    a reduction over t devices of n bytes        2(t − 1)/t·n/(share·link) + latency

A forward takes no less than launching its kernels does; the two are joined as (x⁶ + y⁶)^(1/6). I and W do twice the
FLOP of F, and move what F has kept. Layers that were measured take what was measured.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeback.planner.constants import Constants
from pipeback.planner.hardware import Cluster
from pipeback.planner.layers import Layer

SHARP = 6  # how sharply the larger of two times wins
WORD = 2  # bytes of a number in a 16-bit type


class PassSeconds(NamedTuple):
    """Seconds of a micro-batch at a layer, or at several."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


RECOMPUTE = ("none", "selective", "full")


class Costs(NamedTuple):
    """The cost model on a cluster."""

    cluster: Cluster
    constants: Constants

    def layer(self, layer: Layer, tokens: float, samples: float, tensor: int, recompute: str) -> PassSeconds:
        """The seconds of a micro-batch of so many tokens and samples at a layer that `tensor` devices share."""
        if layer.seconds is not None:
            forward, backward = (samples * seconds for seconds in layer.seconds)
            again = forward if recompute == "full" else 0.0
            return PassSeconds(forward, backward / 2, backward / 2, again)
        c, device, part = self.constants, self.cluster.device, layer.on(tensor)
        flops = device.flops * c.efficiency
        small = (1 + c.small_tokens / tokens) * (1 + c.small_width / part.width) if part.products else 0.0
        products = samples * part.products / flops * small
        attention = samples * part.attention / flops / (1.0 if part.scores else c.fused_attention)
        moved = samples * c.activation_moves * (part.kept + part.shared) / device.memory_speed
        scores = samples * c.score_moves * part.scores / device.memory_speed
        exchange = part.reductions * self.reduction(samples * layer.output, tensor)
        launch = layer.modules * c.launch + part.reductions * c.launch_reduction
        forward = _larger(products + attention + moved + scores + exchange, launch)
        back = _larger(products + 2 * attention + moved + scores + exchange, launch)
        weight = _larger(products, launch) if part.products else 0.0
        core = attention + scores if recompute == "selective" else 0.0
        return PassSeconds(forward, back, weight, forward if recompute == "full" else core)

    # -- what devices exchange -----------------------------------------------------------------------------------------

    def reduction(self, size: float, devices: int) -> float:
        """An all-reduce of so many bytes among neighbouring devices."""
        if devices == 1 or not size:
            return 0.0
        device, c = self.cluster.device, self.constants
        if devices <= device.per_node:
            speed = device.scale_up.speed * c.scale_up
        else:  # one ring through all network links of its nodes
            speed = device.scale_out.speed * device.per_node * c.scale_out
        return 2 * (devices - 1) / devices * size / speed + c.latency

    def message(self, size: float, stride: int, stages: int) -> float:
        """A message of so many bytes to the next stage, which is `stride` devices away."""
        if stages == 1:
            return 0.0
        device, c = self.cluster.device, self.constants
        if stride * stages <= device.per_node:
            return size / (device.scale_up.speed * c.scale_up) + c.message_latency
        # as many of a node's devices send as one stage has there, and share its network links
        senders = min(stride, device.per_node)
        speed = device.scale_out.speed * device.per_node / senders
        return size / (speed * c.message) + c.message_latency

    def gradients(self, size: float, data: int, tensor: int, *, halves: float = 2.0) -> float:
        """The all-reduce of so many bytes among replicas. halves: 2, or 1 for a scatter or a gather alone."""
        if data == 1:
            return 0.0
        return halves * (data - 1) / data * size / self.replica_speed(data, tensor)

    def replica_speed(self, data: int, tensor: int) -> float:
        """The bytes per second of a ring of replicas, whose neighbours are `tensor` devices apart."""
        device, c = self.cluster.device, self.constants
        if data * tensor <= device.per_node:
            return device.scale_up.speed * c.scale_up
        rings = min(tensor, device.per_node)  # that share the network links of a node
        return device.scale_out.speed * device.per_node / rings * c.reduce

    def step(self, parameters: float, bytes_each: float | None = None) -> float:
        """An optimizer step over so many parameters on the device."""
        each = self.constants.optimizer if bytes_each is None else bytes_each
        return parameters * each / self.cluster.device.memory_speed + self.constants.step


def _larger(one: float, other: float) -> float:
    """The larger of two times, or up to 12 % more where they are close."""
    top = max(one, other)
    if not top:
        return 0.0
    return float(top * ((one / top) ** SHARP + (other / top) ** SHARP) ** (1 / SHARP))
