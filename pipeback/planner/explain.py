"""Explain: every number of an option with its formula and its inputs. An option comes in as an argument only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeback.planner.constants import NUMBERS, UNITS
from pipeback.planner.costs import WORD
from pipeback.planner.loss import SOURCE, effective_delay
from pipeback.planner.memory import AFTER_I, MARGIN, NAMES
from pipeback.planner.quantities import days, gigabytes, large


class Line(NamedTuple):
    """A number, how it comes about, and from what."""

    part: str
    name: str
    value: str
    formula: str
    inputs: str = ""


def explain(one: Any) -> list[Line]:
    """All lines of an option, part by part."""
    return [*_model(one), *_time(one), *_step(one), *_memory(one), *_target(one), *_hardware(one), *_constants(one)]


def text(one: Any) -> str:
    """The lines as text."""
    lines = explain(one)
    wide = max(len(line.name) for line in lines)
    most = max(len(line.value) for line in lines)
    told, part = [], ""
    for line in lines:
        if line.part != part:
            part = line.part
            told.append(part)
        of = f"  [{line.inputs}]" if line.inputs else ""
        told.append(f"  {line.name:<{wide}}  {line.value:>{most}}  = {line.formula}{of}")
    return "\n".join(told)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _model(one: Any) -> Iterator[Line]:
    model, shape = one.job.model, one.job.model.shape
    told = (
        f"L {shape.layers}, h {shape.width}, a {shape.heads}, s {shape.context}, V {shape.vocabulary}" if shape else ""
    )
    part = f"model {model.name} ({model.source})"
    yield Line(part, "P, parameters", large(model.parameters), "Σ over layers (planner/layers.py)", told)
    yield Line(part, "FLOP of a sample", f"{model.flops:.4g}", "3 · Σ (products + attention) of a forward")
    block = model.layers[1] if shape else model.layers[0]
    yield Line(
        part,
        f"products of a {block.name}",
        f"{block.products:.4g}",
        "2s(2h² + 2h²·kv/a + n·h·f)" if shape else "counted",
    )
    yield Line(part, f"attention of a {block.name}", f"{block.attention:.4g}", "4s²h" if shape else "with the products")


def _time(one: Any) -> Iterator[Line]:
    option, costs = one.option, one.job.costs(one.option)
    load = max(one.loads, key=lambda load: load.seconds.total)
    layer, count = max(load.runs, key=lambda run: run[1])
    tokens, c = option.micro_batch * one.job.model.context, costs.constants
    seconds = costs.layer(layer, tokens, option.micro_batch, option.tensor, option.recompute)
    part = f"a {layer.name} on {option.tensor} device(s), a micro-batch of {option.micro_batch} (planner/costs.py)"
    of = f"T {tokens}, small_tokens {c.small_tokens:g}, small_width {c.small_width:g}, efficiency {c.efficiency:g}"
    formula = "products/(efficiency·peak)·(1 + small_tokens/T)(1 + small_width/h) + attention + moved + reductions"
    yield Line(part, "F, forward", _ms(seconds.forward), formula, of)
    yield Line(part, "I, gradient of the input", _ms(seconds.input_gradient), "as F, with twice the attention")
    yield Line(part, "W, gradient of the weights", _ms(seconds.weight_gradient), "its products alone")
    yield Line(part, "R, recomputed", _ms(seconds.recomputed), f"recompute={option.recompute}")
    if option.tensor > 1:
        size = option.micro_batch * layer.output
        took, formula = costs.reduction(size, option.tensor), "2(t − 1)/t · bytes/(share · link) + latency"
        of = f"t {option.tensor}, {size / 1e6:.4g} MB, latency {_ms(c.latency)}"
        yield Line(part, "one reduction", _ms(took), formula, of)
    number = str(sum(n for _, n in load.runs))
    yield Line(part, "layers of the slowest stage", number, f"{len(one.loads)} stages", f"{count} {layer.name}s")


def _step(one: Any) -> Iterator[Line]:
    option, took, costs = one.option, one.step, one.job.costs(one.option)
    part = "a step (planner/simulation.py)" if not option.streams else "a step (planner/lanes.py)"
    how = f"{option.technique.order}, {option.pipeline} workers, {option.micro_batches} micro-batches"
    yield Line(part, "seconds", f"{took.seconds:.4g} s", "simulated", how if not option.streams else "layer by layer")
    for name, seconds, formula in (
        ("computing", took.computing, "m·Σ (F + I + W) of the busiest worker"),
        ("recomputing", took.recomputing, "m·Σ R"),
        ("messages", took.messages, "m·(bytes/(message·network share) + message_latency), each way"),
        ("gradients among replicas", took.reducing, "2(d − 1)/d · 2 B · P/speed among replicas"),
        ("optimizer", took.optimizer, "optimizer bytes · P/memory speed + step"),
        ("waiting for stages", took.bubble, "seconds − all of the above"),
        ("waiting for weights", took.waiting, "computing waits for fetches and updates"),
    ):
        yield Line(part, name, f"{seconds:.4g} s", formula)
    if option.data > 1:
        near = option.data * option.tensor <= costs.cluster.device.per_node
        formula = "scale_up · links within the node" if near else "reduce · network of a node/rings that share it"
        speed = f"{costs.replica_speed(option.data, option.tensor) / 1e9:.4g} GB/s"
        yield Line(part, "speed among replicas", speed, formula, f"d {option.data}, {WORD} B per gradient")
    yield Line(part, "bubble", f"{one.bubble:.2%}", "waiting for stages/seconds")
    yield Line(part, "MFU", f"{one.mfu:.2%}", "FLOP of a sample · samples/(seconds · devices · peak)",
               f"{option.batch} samples, {option.devices} devices")  # fmt: skip


def _memory(one: Any) -> Iterator[Line]:
    option, numbers = one.option, one.job.precision
    worker = max(range(len(one.footprint.devices)), key=lambda n: one.footprint.devices[n].total)
    load, full = one.loads[min(worker, len(one.loads) - 1)], one.footprint.devices[worker]
    part = f"memory of the fullest device, of worker {worker} (planner/memory.py)"
    told = f"P on the device {large(load.parameters)}"
    flying = one.routine.in_flight(worker) if not option.streams else option.micro_batches
    formulas = (
        f"{numbers.weights} B · P", f"{numbers.weights} B · P · (held − 1)", f"{numbers.gradients} B · P",
        f"({numbers.masters} + {numbers.optimizer}) B · P/replicas that share it", f"{numbers.state} B · P · state",
        "in flight · kept + what is computed once more", f"(prefetch + 1) · {numbers.weights} B · largest layer",
    )  # fmt: skip
    inputs = (
        told, f"held {option.technique.held(worker, option.pipeline):g}", "", f"shard={option.shard}, d {option.data}",
        f"state {option.technique.state:g}",
        f"{flying} in flight, {AFTER_I * one.routine.unfinished(worker):.3g} awaiting W, "
        f"kept {load.kept / 1e6:.4g} MB, once more {load.again / 1e6:.4g} MB", f"prefetch {option.prefetch}",
    )  # fmt: skip
    for name, size, formula, of in zip(NAMES, full, formulas, inputs, strict=True):
        if size:
            yield Line(part, name, f"{gigabytes(size)} GB", formula, of)
    yield Line(part, "required", f"{gigabytes(one.required)} GB", f"sum/(1 − {MARGIN:g}), the allocator's margin",
               f"{one.job.cluster.device.name} has {gigabytes(one.job.cluster.device.memory)} GB")  # fmt: skip
    for name, size in (("host", one.footprint.host), ("disk", one.footprint.disk)):
        if size:
            yield Line(
                part, f"{name}, per device", f"{gigabytes(size)} GB", "what is not on the device, and its optimizer"
            )


def _target(one: Any) -> Iterator[Line]:
    job, option = one.job, one.option
    part = "time to the target (planner/loss.py)"
    delays = option.technique.delays(option.stages)
    yield Line(part, "D at stage 0", str(option.delay), "updates between F and B", f"slack {option.technique.slack}")
    yield Line(part, "τ', effective delay", f"{effective_delay(delays):.4g}", "sqrt(Σ D²/S)", f"S {option.stages}")
    yield Line(
        part, "slow", f"{one.slow.factor:.4g}", "1 + κ·τ'", f"κ {one.slow.kappa:g}, {one.slow.known}: {one.slow.source}"
    )
    yield Line(
        part, "B, tokens per update", large(one.tokens_per_update), "samples · context", f"{option.batch} samples"
    )
    yield Line(
        part,
        "cost of the batch",
        f"{one.batch_factor:.4g}",
        "1 + B/B_crit",
        f"B_crit {large(job.loss.critical_batch)}: {SOURCE}",
    )
    yield Line(part, "tokens per second", large(one.throughput), "B/seconds")
    yield Line(
        part, "days of tokens", days(one.plain_days * 86_400), "tokens/tokens per second", f"{large(job.tokens)} tokens"
    )
    yield Line(part, "days to the target", days(one.days * 86_400), "days of tokens · slow · cost of the batch")
    yield Line(part, "device-days", f"{one.device_days:,.1f}", "days · devices", f"{option.devices} devices")
    if job.price:
        yield Line(part, "price", f"{one.cost:,.0f}", "24 · device-days · price", f"{job.price:g} per device and hour")


def _hardware(one: Any) -> Iterator[Line]:
    device = one.job.cluster.device
    part = f"{device.title or device.name} ({device.source})"
    for name, value, number in (
        ("peak", f"{device.flops / 1e12:g} TFLOP/s", "tflops"), ("memory", f"{gigabytes(device.memory)} GB", "memory"),
        ("memory speed", f"{device.memory_speed / 1e9:g} GB/s", "memory_speed"),
        ("within the node", f"{device.scale_up.speed / 1e9:g} GB/s", "scale_up"),
        ("network", f"{device.scale_out.speed / 1e9:g} GB/s", "scale_out"),
        ("host link", f"{device.host.speed / 1e9:g} GB/s", "host"),
    ):  # fmt: skip
        yield Line(
            part, name, value, "not confirmed by a primary source" if number in device.unconfirmed else "data sheet"
        )


def _constants(one: Any) -> Iterator[Line]:
    used = one.job.costs(one.option).constants
    part = f"constants {used.name}, fitted on {used.fitted_on}"
    for name in NUMBERS:
        yield Line(part, name, f"{getattr(used, name):.4g}", UNITS.get(name, "share"))
    for mark in one.marks:
        yield Line("outside what was measured", "†", "", mark)
