"""Options: one way to train a model on a cluster, as numbers, and whether they contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.planner.costs import RECOMPUTE
from pipeback.planner.hardware import Cluster
from pipeback.planner.models import Model
from pipeback.planner.techniques import Technique

SHARDS = ("none", "optimizer", "all")
STORES = ("device", "host", "disk")


@dataclass(frozen=True)
class Option:
    """data × pipeline × tensor devices; each pipeline of a replica trains `micro_batches` per update."""

    technique: Technique
    data: int = 1  # replicas
    pipeline: int = 1  # workers in a row
    tensor: int = 1  # devices that share a layer
    chunks: int = 1  # stages per worker
    micro_batch: int = 1  # samples
    micro_batches: int = 1  # per flush or group; 1 where every micro-batch is an update
    recompute: str = "none"  # or "selective" (attention scores), or "full"
    shard: str = "none"  # what replicas share out: nothing, "optimizer" states, or "all"
    store: str = "device"  # where weights live: "device", "host" or "disk"
    prefetch: int = 1  # layers fetched ahead, with a store or with everything shared out

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def batch(self) -> int:
        """Samples per update."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def streams(self) -> bool:
        """Whether weights come to the device layer by layer."""
        return self.store != "device" or self.shard == "all"

    @property
    def delay(self) -> int:
        """D of the first stage, in updates."""
        return self.technique.delays(self.stages)[0]

    def check(self, model: Model, cluster: Cluster) -> None:
        """Raise ValueError, by name, if this cannot be."""
        if self.devices > cluster.count:
            raise ValueError(
                f"data={self.data} × pipeline={self.pipeline} × tensor={self.tensor} are {self.devices} devices, "
                f"more than the {cluster.count} there are; give devices={self.devices}x{cluster.device.name}"
            )
        if self.technique.order == "zb_v" and self.chunks != 2 and self.pipeline > 1:
            raise ValueError(f"{self.technique.name} has two stages per worker, not {self.chunks}; give chunks=2")
        check_stages(self.stages, model, self.chunks)
        check_tensor(self.tensor, model)
        for name, value, known in (
            ("recompute", self.recompute, RECOMPUTE), ("shard", self.shard, SHARDS), ("store", self.store, STORES),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(
                    f"{name}={value!r} is unknown to an option, which has {', '.join(known)}; give {name}={known[0]}"
                )
        if self.streams and self.pipeline > 1:
            raise ValueError(
                f"store={self.store}, shard={self.shard}: the planner streams through whole replicas; give stages=1, "
                'or plan the model at hand with pipe.plan(device="...")'
            )


def check_stages(stages: int, model: Model, chunks: int = 1) -> None:
    """Raise ValueError if a model cannot be cut into so many stages."""
    if stages > model.blocks:
        raise ValueError(
            f"stages={stages} are more than the {model.blocks} layers of {model.name}; "
            f"give stages={model.blocks // chunks} or fewer"
        )


def check_tensor(tensor: int, model: Model) -> None:
    """Raise ValueError if a layer cannot be shared out over so many devices."""
    if tensor > 1 and (not model.heads or model.heads % tensor):
        most = max((n for n in range(1, tensor) if model.heads and not model.heads % n), default=1)
        raise ValueError(f"tensor={tensor} does not divide heads={model.heads} of {model.name}; give tensor={most}")
