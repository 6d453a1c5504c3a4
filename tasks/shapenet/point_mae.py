"""Point-MAE: a masked autoencoder of point clouds, and a classifier with the same encoder.

Pang et al., "Masked Autoencoders for Point Cloud Self-supervised Learning" (ECCV 2022,
arXiv 2203.06604), sections 3.1 to 3.4. A cloud is divided into patches around its farthest points.
A small PointNet embeds each visible patch as a token, and a transformer encodes these tokens. A
smaller transformer, which also gets the centres of the hidden patches, predicts their points.

One thing differs from the published code, which embeds the hidden patches and discards the result.
Here they are not embedded, which saves 60 % of the embedding's work and leaves them out of its
batch statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.shapenet.points import patches, taken


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks and of their patches."""

    groups: int
    """Patches of one cloud."""
    group_size: int
    """Points of one patch."""
    width: int
    depth: int
    heads: int
    decoder_depth: int
    drop_path: float
    """Rate of stochastic depth in the last block; it grows linearly from 0 in the first."""


class PointMAE(nn.Module):
    """The autoencoder, whose encoder also extracts features."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.mask_token = nn.Parameter(torch.empty(shape.width))
        self.position = _position(shape.width)
        self.decoder = Transformer(shape.width, shape.decoder_depth, shape.heads, shape.drop_path)
        self.head = nn.Linear(shape.width, 3 * shape.group_size)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        for module in self.decoder.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, clouds: Tensor, order: Tensor | None = None, num_visible: int = 0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Reconstruct, or extract features.

        Args:
            clouds: [B, N, 3].
            order: order of the patches of each cloud, int64 [B, groups]: the first `num_visible`
                are visible, and the others are hidden and predicted. None: extract features of all
                patches.
            num_visible: number of visible patches, used with `order` only.
        Returns:
            With `order`: the hidden patches as predicted and as they are, [B, hidden, group_size,
            3] each, relative to their centres. Without: features [B, 2 * width], the maximum and
            the mean over the tokens.
        """
        inside, centres = self.encoder.patches(clouds, self.shape.groups, self.shape.group_size)
        if order is None:
            tokens = self.encoder(inside, centres)
            return torch.cat([tokens.amax(1), tokens.mean(1)], dim=-1)
        inside, centres = taken(inside, order), taken(centres, order)
        tokens = self.encoder(inside[:, :num_visible], centres[:, :num_visible])
        hidden = inside[:, num_visible:]
        blanks = self.mask_token.to(tokens.dtype).expand(*hidden.shape[:2], -1)
        tokens = self.decoder(torch.cat([tokens, blanks], dim=1), self.position(centres))
        drawn = self.head(tokens[:, num_visible:])
        return drawn.unflatten(-1, (self.shape.group_size, 3)), hidden


class PointClassifier(nn.Module):
    """The encoder with a class token and the head of Point-MAE's fine-tuning."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.class_token = nn.Parameter(torch.empty(shape.width))
        self.class_position = nn.Parameter(torch.empty(shape.width))
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.class_position, std=0.02)
        hidden = 2 * shape.width // 3  # the published 256 at the published width of 384
        self.head = nn.Sequential(
            *_hidden_layer(2 * shape.width, hidden),
            *_hidden_layer(hidden, hidden),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, clouds: Tensor) -> Tensor:
        """Return logits [B, num_classes] for clouds [B, N, 3]."""
        inside, centres = self.encoder.patches(clouds, self.shape.groups, self.shape.group_size)
        tokens, positions = self.encoder.embed(inside), self.encoder.position(centres)
        tokens = torch.cat([self.class_token.to(tokens).expand_as(tokens[:, :1]), tokens], 1)
        first = self.class_position.to(positions).expand_as(positions[:, :1])
        tokens = self.encoder.transformer(tokens, torch.cat([first, positions], 1))
        return self.head(torch.cat([tokens[:, 0], tokens[:, 1:].amax(1)], dim=-1))


class Encoder(nn.Module):
    """The encoder: from patches and their centres to tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # The compiler would unroll the loop in `patches`. It is disabled here instead of by a
        # decorator there, because this imports the compiler, which takes a second.
        self.patches = torch.compiler.disable(patches)
        self.embed = PatchEmbedding(shape.width)
        self.position = _position(shape.width)
        self.transformer = Transformer(shape.width, shape.depth, shape.heads, shape.drop_path)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, inside: Tensor, centres: Tensor) -> Tensor:
        """Return tokens [B, G, width] for patches [B, G, K, 3] around centres [B, G, 3]."""
        return self.transformer(self.embed(inside), self.position(centres))


class PatchEmbedding(nn.Module):
    """A small PointNet, whose result does not depend on the order of the points in a patch.

    At a width of 384, its layers have the published widths (128, 256, 512); otherwise they are
    scaled in proportion.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow = width // 3
        self.first = _pointwise(3, narrow, 2 * narrow)
        self.second = _pointwise(4 * narrow, 4 * narrow, width)

    def forward(self, inside: Tensor) -> Tensor:
        """Return tokens [B, G, width] for patches [B, G, K, 3]."""
        rows = inside.flatten(0, 1)  # [BG, K, 3]
        points = self.first(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        whole = points.amax(1, keepdim=True).expand_as(points)
        points = torch.cat([whole, points], dim=-1)
        points = self.second(points.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return points.amax(1).unflatten(0, inside.shape[:2])


class Transformer(nn.Module):
    """Pre-norm blocks. Positions are added before each block, not only before the first."""

    def __init__(self, width: int, depth: int, heads: int, drop_path: float) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block  # takes seconds

        rates = [drop_path * level / max(depth - 1, 1) for level in range(depth)]
        # The published blocks normalize as PyTorch does by default; timm has an eps of its own.
        norm = nn.LayerNorm
        self.blocks = nn.ModuleList(
            [Block(width, heads, drop_path=rate, norm_layer=norm) for rate in rates]
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return tokens [B, T, width] for tokens and positions, [B, T, width] each."""
        for block in self.blocks:
            tokens = block(tokens + positions)
        return self.norm(tokens)


def _position(width: int) -> nn.Module:
    """Return a module that embeds centres [..., 3] as positions [..., width]."""
    return nn.Sequential(nn.Linear(3, width // 3), nn.GELU(), nn.Linear(width // 3, width))


def _pointwise(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Return two layers that are applied to each point: from [P, inputs] to [P, outputs]."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def _hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.5)]
