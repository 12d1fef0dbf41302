"""More models for the census of `pipeback zoo --others`, of torchvision, timm and transformers, with random weights."""

# ruff: noqa: SIM905 (names read better as words than as a list of strings)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeback.private import pytree
from pipeback.recipes.foreign import hugging_face, scenes
from pipeback.recipes.foreign.case import CLASSES, Case, pictures, steady

TORCHVISION = (
    "alexnet densenet121 googlenet mobilenet_v2 mobilenet_v3_small efficientnet_b0 efficientnet_v2_s "
    "shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5 regnet_x_400mf regnet_y_400mf resnet34 resnext50_32x4d swin_t "
    "swin_v2_t convnext_tiny vgg11_bn"
).split()
TIMM = (
    "resnet10t resnetv2_18 seresnet18 skresnet18 res2net50_26w_4s resnest14d regnetx_002 mobilenetv3_small_050 "
    "lcnet_035 ghostnet_050 hardcorenas_a semnasnet_050 dla46_c hrnet_w18_small selecsls42 ese_vovnet19b_slim_dw "
    "cspresnet50 repghostnet_050 rexnet_100 inception_next_atto starnet_s1 mambaout_femto efficientvit_b0 "
    "edgenext_xx_small mobilevit_xxs poolformer_s12 fastvit_t8 repvit_m0_9 pvt_v2_b0 convnext_atto convnextv2_atto "
    "nf_resnet26 eca_nfnet_l0 lambda_resnet26t davit_tiny focalnet_tiny_srf"
).split()
# models for one size of images only
TIMM_SIZED = (
    "test_vit test_vit2 test_vit3 test_vit_relpos mixer_s32_224 gmlp_ti16_224 resmlp_12_224 xcit_nano_12_p16_224 "
    "deit_tiny_patch16_224 cait_xxs24_224 convit_tiny pit_ti_224 twins_pcpvt_small volo_d1_224"
).split()
SIZE = 64  # of an image
NAMES = (*TORCHVISION, *scenes.NAMES, *(f"timm/{name}" for name in [*TIMM, *TIMM_SIZED]), *hugging_face.MODELS)


def case(name: str) -> Case:
    """Return the model of that name. Raises ImportError naming a missing package."""
    if name in hugging_face.MODELS:
        return hugging_face.case(name)
    if name in scenes.NAMES:
        return scenes.case(name)
    package, _, inside = name.rpartition("/")
    model = _timm(inside) if package else _torchvision(name)
    return Case(steady(model), pictures(size=SIZE), _classes)


def package(name: str) -> str:
    """Return the package that a model comes from."""
    if name in hugging_face.MODELS:
        return "transformers"
    return name.partition("/")[0] if "/" in name else "torchvision"


def _torchvision(name: str) -> nn.Module:
    import torchvision

    more = {"init_weights": False} if name == "googlenet" else {}
    return getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **more)


def _timm(name: str) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ImportError("models of timm need it: pip install timm") from error

    more: dict[str, Any] = {"img_size": SIZE} if name in TIMM_SIZED else {}
    return timm.create_model(name, num_classes=CLASSES, **more)


def _classes(output: Any, y: Tensor) -> Tensor:
    """Return a loss of all outputs of a model, with those of auxiliary classifiers."""
    losses = [nn.functional.cross_entropy(part, y) for part in pytree.tree_leaves(output)]
    return torch.stack(losses).sum()
