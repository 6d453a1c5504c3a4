"""UperNet on a backbone of timm.

Xiao et al., "Unified Perceptual Parsing for Scene Understanding" (ECCV 2018). The heads are those
of transformers, the backbone is any of timm's that gives four feature maps.
"""

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from co2.errors import ConfigError, require

TINY = "tiny"
"""A ResNet for scale=smoke: the stem and three blocks, 16 to 64 channels, maps at half the size
of the image and down to a sixteenth."""

_TINY: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64), "stem_width": 16}
_TINY_MAPS = (0, 1, 2, 3)
_MAPS = 4


class UperNet(nn.Module):
    """Images, fp32 [B, 3, H, W], to logits [B, num_classes, h, w] at the size of the first map;
    in training mode those of the auxiliary head too, at the size of the third.

    Args:
        backbone: gives the maps, the widest first.
        channels: of its maps.
        hidden: channels of the head. The auxiliary one, on the map before the last, has half.
    """

    def __init__(
        self, backbone: nn.Module, channels: list[int], hidden: int, num_classes: int
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

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        maps = self.backbone(images)
        logits = self.decode_head(maps)
        return (logits, self.auxiliary_head(maps)) if self.training else logits


def upernet(backbone: str, weights: str | None, hidden: int, num_classes: int) -> UperNet:
    """A new model on the default device; arguments as for `check_backbone` and `UperNet`. On the
    device meta no weights are read."""
    more: dict[str, Any] = {}
    if weights is not None and torch.get_default_device().type != "meta":
        # In place of what timm would download.
        more = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": _read(weights)}}
    features = _create(backbone, features_only=True, out_indices=_maps(backbone), **more)
    return UperNet(features, features.feature_info.channels(), hidden, num_classes)


def check_backbone(backbone: str, weights: str | None) -> None:
    """See that timm has the backbone, and that the weights fit it.

    Args:
        backbone: "tiny", or a model of timm with maps of four different sizes.
        weights: a file with its state dict, .pth or .safetensors; a classifier in it is passed
            over. null: random weights.
    Raises:
        ConfigError: with the keys "backbone" and "weights".
    """
    if backbone == TINY and weights is None:
        return  # nothing can be wrong, and importing timm takes a second
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
    """A model of timm. `Any`: it is an nn.Module with attributes that nn.Module does not
    declare."""
    import timm

    if backbone == TINY:
        return timm.create_model("resnet18", **_TINY, **more)
    return timm.create_model(backbone, **more)


def _maps(backbone: str) -> tuple[int, ...]:
    """The indices of the maps that UperNet takes: the backbone's four smallest."""
    import timm

    if backbone == TINY:
        return _TINY_MAPS
    if not timm.is_model(backbone):
        # The nearest one, however far: to list more than a thousand would help nobody.
        close = difflib.get_close_matches(backbone, [TINY, *timm.list_models()], n=1, cutoff=0)
        hint = f"timm has no such model; the nearest name is {close[0]}"
        raise ConfigError("backbone", backbone, hint)
    with torch.device("meta"):
        try:
            features = _create(backbone, features_only=True)
            channels = features.feature_info.channels()
            maps = features(torch.empty(2, 3, 256, 192))[-_MAPS:]
        except Exception:  # each family of models has its own way to refuse
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
        return load_state_dict(weights)
    except Exception as error:  # pickle and safetensors raise many kinds
        hint = f"is not a state dict of timm ({type(error).__name__})"
        raise ConfigError("weights", weights, hint) from None
