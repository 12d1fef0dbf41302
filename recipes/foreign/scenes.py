"""Models of torchvision for scenes: detection, segmentation, video and optical flow, for the census."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from pipeback.recipes.foreign.case import Case, steady

KINDS = 5  # of objects, pixels and clips
SIDE, FRAMES = 64, 4  # of an image and a clip
DETECTION = ("fasterrcnn_mobilenet_v3_large_320_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "mvit_v2", "swin3d")
FLOW = ("raft_small",)
NAMES = (*DETECTION, *SEGMENTATION, *VIDEO, *FLOW)


def case(name: str) -> Case:
    """Return the model of that name. mvit_v2 and swin3d are small, all others as torchvision makes them."""
    model = steady((_detector if name in DETECTION else _other)(name).train())
    if name in DETECTION:
        return Case(model, _images, lambda losses, _: torch.stack(list(losses.values())).sum())
    if name in SEGMENTATION:
        return Case(model, _pixels, lambda output, y: nn.functional.cross_entropy(output["out"], y))
    if name in VIDEO:
        return Case(model, _clips, nn.functional.cross_entropy)
    return Case(model, _pairs, lambda flows, y: torch.stack([(flow - y).abs().mean() for flow in flows]).sum())


def _detector(name: str) -> nn.Module:
    from torchvision.models import detection

    # R-CNNs choose among proposals at random, unless they may take all
    more = {"rpn_batch_size_per_image": 10**5, "box_batch_size_per_image": 10**5} if "rcnn" in name else {}
    found: nn.Module = getattr(detection, name)(
        weights=None, weights_backbone=None, num_classes=KINDS, min_size=SIDE, max_size=SIDE, **more
    )
    return found


def _other(name: str) -> nn.Module:
    import torchvision.models as models

    found: nn.Module
    if name == "mvit_v2":
        from torchvision.models.video.mvit import MSBlockConfig, MViT

        blocks = [
            MSBlockConfig(heads, before, after, [3] * 3, [3] * 3, [1, side, side], [1, 3 - side, 3 - side])
            for heads, before, after, side in ((1, 16, 16, 1), (2, 16, 32, 2), (2, 32, 32, 1))
        ]
        return MViT(
            (SIDE, SIDE), FRAMES, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
            proj_after_attn=True, num_classes=KINDS,
        )  # fmt: skip
    if name == "swin3d":
        return models.video.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 2], [2, 4, 4], num_classes=KINDS)
    if name in FLOW:
        found = getattr(models.optical_flow, name)(weights=None)
        return found
    room, more = (models.segmentation, {"weights_backbone": None}) if name in SEGMENTATION else (models.video, {})
    found = getattr(room, name)(weights=None, num_classes=KINDS, **more)
    return found


def _images(generator: Generator) -> tuple[Any, Any]:
    """Two images with three boxes each, whose losses the model computes."""
    targets = []
    for _ in range(2):
        corner = torch.rand(3, 2, generator=generator) * SIDE / 2
        size = 8 + torch.rand(3, 2, generator=generator) * SIDE / 3
        targets.append({
            "boxes": torch.cat([corner, corner + size], 1),
            "labels": torch.randint(1, KINDS, (3,), generator=generator),
            "masks": torch.randint(0, 2, (3, SIDE, SIDE), generator=generator, dtype=torch.uint8),
        })  # fmt: skip
    return ([torch.rand(3, SIDE, SIDE, generator=generator) for _ in range(2)], targets), None


def _pixels(generator: Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(2, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(KINDS, (2, SIDE, SIDE), generator=generator)


def _clips(generator: Generator) -> tuple[Tensor, Tensor]:
    clips = torch.randn(2, 3, FRAMES, SIDE, SIDE, generator=generator)
    return clips, torch.randint(KINDS, (2,), generator=generator)


def _pairs(generator: Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two images of 128 × 128, of which RAFT's coarsest level needs as many, and the motion between them."""
    first, second = (torch.rand(1, 3, 2 * SIDE, 2 * SIDE, generator=generator) for _ in range(2))
    return (first, second), torch.rand(1, 2, 2 * SIDE, 2 * SIDE, generator=generator)
