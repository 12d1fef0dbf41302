"""Vision: torchvision's networks for images, with GroupNorm in place of batch normalisation."""

from __future__ import annotations

import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models.convnext import CNBlockConfig

from pipeback.norms import to_group_norm
from pipeback.recipes.foreign.case import CLASSES, Case, pictures, steady


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


def resnet18() -> Case:
    model = torchvision.models.resnet18(num_classes=CLASSES, norm_layer=group_norm)
    return Case(model, pictures(), cross_entropy)


def resnet50() -> Case:
    model = torchvision.models.resnet50(num_classes=CLASSES, norm_layer=group_norm)
    return Case(model, pictures(), cross_entropy)


def vgg11() -> Case:
    """vgg11_bn with a classifier for small images; it repeats no block."""
    features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"], batch_norm=True)
    model = torchvision.models.VGG(features, num_classes=CLASSES, init_weights=True, dropout=0.0)
    model.avgpool, model.classifier[0] = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 4096)
    to_group_norm(model, 8)
    return Case(model, pictures(), cross_entropy, cuts=("layer",))


def vit() -> Case:
    """A smaller vit_b_16."""
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=256, num_classes=CLASSES
    )
    nn.init.normal_(model.heads.head.weight, std=0.02)  # if zero, nothing below the head would learn
    return Case(model, pictures(), cross_entropy)


def convnext() -> Case:
    """A narrower convnext_tiny with fewer blocks."""
    setting = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)]
    model = torchvision.models.ConvNeXt(setting, num_classes=CLASSES, layer_scale=0.1)
    return Case(steady(model), pictures(), cross_entropy)
