"""Point-MAE: a masked autoencoder of point clouds, and a classifier with the same encoder.

Pang et al., "Masked Autoencoders for Point Cloud Self-supervised Learning" (ECCV 2022,
arXiv 2203.06604), sections 3.1 to 3.4. A cloud becomes patches around its farthest points; a small
PointNet makes each visible patch a token; a transformer reads these; a lighter one is told the
centres of the hidden patches and draws their points.

One thing differs from the published code: hidden patches are not embedded at all (there they are,
and thrown away), which saves 60 % of the embedding and leaves them out of its batch statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.points import patches, taken


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks and of the patches that they see."""

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
    """The autoencoder; without `order`, its encoder as an extractor of features."""

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
            order: of the patches of each cloud, int64 [B, groups]: the first `num_visible` are
                seen, the others are to be drawn. None: all are seen, nothing is drawn.
        Returns:
            With `order`: the hidden patches as drawn and as they are, [B, hidden, group_size, 3],
            relative to their centres. Without: features [B, 2 * width], the largest and the mean
            of the tokens.
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
        """Logits [B, num_classes] of clouds [B, N, 3]."""
        inside, centres = self.encoder.patches(clouds, self.shape.groups, self.shape.group_size)
        tokens, positions = self.encoder.embed(inside), self.encoder.position(centres)
        tokens = torch.cat([self.class_token.to(tokens).expand_as(tokens[:, :1]), tokens], 1)
        first = self.class_position.to(positions).expand_as(positions[:, :1])
        tokens = self.encoder.transformer(tokens, torch.cat([first, positions], 1))
        return self.head(torch.cat([tokens[:, 0], tokens[:, 1:].amax(1)], dim=-1))


class Encoder(nn.Module):
    """Patches and their centres to tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # A compiler would unroll the loop in it. Here, not as a decorator there, because this
        # imports the compiler, which costs a second.
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
        """Patches [B, G, K, 3] around centres [B, G, 3]: tokens [B, G, width]."""
        return self.transformer(self.embed(inside), self.position(centres))


class PatchEmbedding(nn.Module):
    """A small PointNet, which does not mind the order of the points of a patch.

    Its widths are the published ones (128, 256, 512) at a width of 384, and in proportion else.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow = width // 3
        self.first = _pointwise(3, narrow, 2 * narrow)
        self.second = _pointwise(4 * narrow, 4 * narrow, width)

    def forward(self, inside: Tensor) -> Tensor:
        """Patches [B, G, K, 3] to tokens [B, G, width]."""
        rows = inside.flatten(0, 1)  # [BG, K, 3]
        points = self.first(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        whole = points.amax(1, keepdim=True).expand_as(points)
        points = torch.cat([whole, points], dim=-1)
        points = self.second(points.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return points.amax(1).unflatten(0, inside.shape[:2])


class Transformer(nn.Module):
    """Pre-norm blocks; positions are added before each of them, not only before the first."""

    def __init__(self, width: int, depth: int, heads: int, drop_path: float) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block  # costs seconds

        rates = [drop_path * level / max(depth - 1, 1) for level in range(depth)]
        self.blocks = nn.ModuleList([Block(width, heads, drop_path=rate) for rate in rates])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, T, width], and positions alike: tokens [B, T, width]."""
        for block in self.blocks:
            tokens = block(tokens + positions)
        return self.norm(tokens)


def _position(width: int) -> nn.Module:
    """Positions [..., width] of centres [..., 3]."""
    return nn.Sequential(nn.Linear(3, width // 3), nn.GELU(), nn.Linear(width // 3, width))


def _pointwise(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """The same two layers for every point, [P, inputs] to [P, outputs]."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def _hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.5)]
