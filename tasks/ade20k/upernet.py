"""UperNet with a backbone of timm.

Xiao et al., "Unified Perceptual Parsing for Scene Understanding" (ECCV 2018). The heads are those
of transformers, and the backbone is any model of timm with four feature maps of different sizes.
"""

import difflib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.errors import ConfigError, require

TINY = "tiny"
"""A ResNet for scale=smoke: the stem and three blocks, with 16 to 64 channels and maps from 1/2
down to 1/16 of the image's size."""

# `Any`, because timm.create_model has options of many types; in `upernet` and `_create`, too.
_TINY: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64), "stem_width": 16}
_TINY_MAPS = (0, 1, 2, 3)
_MAPS = 4


class UperNet(nn.Module):
    """UperNet: a backbone, a head, and an auxiliary head that is used in training only.

    Args:
        backbone: returns four feature maps, the largest first.
        channels: numbers of channels of these maps.
        hidden: channels of the head. The auxiliary head, on the third map, has half as many.
        num_classes: number of classes.
        dropout: probability that a channel is dropped before the classes of either head.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: list[int],
        hidden: int,
        num_classes: int,
        dropout: float = 0.0,
    ) -> None:
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        super().__init__()
        shape = UperNetConfig(
            hidden_size=hidden,
            num_labels=num_classes,  # type: ignore[call-arg]  # one of PreTrainedConfig's own
            auxiliary_in_channels=channels[-2],
            auxiliary_channels=max(1, hidden // 2),
        )
        self.backbone = backbone
        self.decode_head = UperNetHead(shape, channels)
        self.auxiliary_head = UperNetFCNHead(shape, channels)
        if dropout > 0:
            for head in (self.decode_head, self.auxiliary_head):
                head.classifier.register_forward_pre_hook(partial(_dropped, dropout))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits for images, fp32 [B, 3, H, W]: [B, num_classes, h, w] at the size of the
        first map, and in training mode also those of the auxiliary head, at the size of the
        third."""
        maps = self.backbone(images)
        logits = self.decode_head(maps)
        return (logits, self.auxiliary_head(maps)) if self.training else logits


def _dropped(dropout: float, classifier: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return F.dropout2d(inputs[0], dropout, classifier.training)


def upernet(
    backbone: str, weights: str | None, hidden: int, num_classes: int, dropout: float = 0.0
) -> UperNet:
    """Make a new model on the default device. For the arguments see `check_backbone` and `UperNet`.
    On the device "meta" the file of weights is not read."""
    more: dict[str, Any] = {}
    if weights is not None and torch.get_default_device().type != "meta":
        # timm takes this state dict in place of one that it would download.
        more = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": _read(weights)}}
    features = _create(backbone, features_only=True, out_indices=_maps(backbone), **more)
    return UperNet(features, features.feature_info.channels(), hidden, num_classes, dropout)


def check_backbone(backbone: str, weights: str | None) -> None:
    """Check that timm has the backbone, and that the weights fit it.

    Args:
        backbone: "tiny", or the name of a model of timm with feature maps of four sizes.
        weights: a file with its state dict, .pth or .safetensors, in which a classifier is ignored.
            None: random weights.
    Raises:
        ConfigError: they cannot be used; the key is "backbone" or "weights".
    """
    if backbone == TINY and weights is None:
        return  # nothing can be wrong, and the import of timm takes a second
    with torch.device("meta"):
        _maps(backbone)
        whole = _create(backbone, num_classes=0).state_dict()
    if weights is None:
        return
    given = _read(weights)
    missing = [name for name in whole if name not in given]
    if missing:
        hint = f"does not fit {backbone}: it lacks {missing[0]}, one of {len(missing)} weights"
        raise ConfigError("weights", weights, hint)
    for name, weight in whole.items():
        there, here = list(given[name].shape), list(weight.shape)
        hint = f"does not fit {backbone}: {name} has the shape {there}, not {here}"
        require(there == here, "weights", weights, hint)


def _create(backbone: str, **more: Any) -> Any:
    """Make a model of timm. It is returned as `Any`, because it has attributes that nn.Module does
    not declare."""
    import timm

    if backbone == TINY:
        return timm.create_model("resnet18", **_TINY, **more)
    return timm.create_model(backbone, **more)


def _maps(backbone: str) -> tuple[int, ...]:
    """Return the indices of the feature maps that UperNet takes, which are the four smallest.

    Raises:
        ConfigError: timm has no such backbone, or it does not give such maps.
    """
    import timm

    if backbone == TINY:
        return _TINY_MAPS
    if not timm.is_model(backbone):
        # Only the nearest name is shown, however far it is: there are more than a thousand.
        close = difflib.get_close_matches(backbone, [TINY, *timm.list_models()], n=1, cutoff=0)
        hint = f"timm has no such model; the nearest name is {close[0]}"
        raise ConfigError("backbone", backbone, hint)
    with torch.device("meta"):
        try:
            features = _create(backbone, features_only=True)
            channels = features.feature_info.channels()
            maps = features(torch.empty(2, 3, 256, 192))[-_MAPS:]
        except Exception:  # each family of models raises errors of its own
            maps, channels = [], []
    sizes = {tuple(found.shape[2:]) for found in maps}
    good = len(sizes) == _MAPS and [found.shape[1] for found in maps] == channels[-_MAPS:]
    hint = f"does not give {_MAPS} maps of different sizes; take a ResNet or a ConvNeXt"
    require(good, "backbone", backbone, hint)
    return tuple(range(len(channels) - _MAPS, len(channels)))


def _read(weights: str) -> dict[str, Tensor]:
    from timm.models import load_state_dict

    require(Path(weights).is_file(), "weights", weights, "no such file")
    try:
        with warnings.catch_warnings():  # torch's, before it refuses a pickle
            warnings.simplefilter("ignore")
            found = load_state_dict(weights, weights_only=True)
    except Exception as error:  # pickle and safetensors raise errors of many types
        hint = f"is not a state dict of timm ({type(error).__name__})"
        raise ConfigError("weights", weights, hint) from None
    bad = [name for name, weight in found.items() if not isinstance(weight, Tensor)]
    require(not bad, "weights", weights, f"{''.join(bad[:1])} is no weight; give a state dict")
    for name, weight in found.items():
        require(bool(weight.isfinite().all()), "weights", weights, f"{name} is not finite")
    return found
