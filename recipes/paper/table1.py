"""Table 1: vision. ImageNet classification, segmentation, point clouds.

    make table1                                            all that is missing at scale=smoke
    python -m recipes run table1 --scale paper --launcher slurm

Cost: smoke, 81 runs of half a minute to a minute and a half on 2 cores, an hour. Paper:
docs/reproduce.md; nobody has run it here. At smoke scale ResNet-50 is recipe fashion's, because on
digits every method is right on 98 %.
Found (results/tables/table1.md): under AdamW the overlapped methods end above AllReduce's loss.
"""

from functools import partial

from recipes.recipe import SCALES, Column, Recipe
from recipes.tables.methods import ADAM_ONLY, ALL_ROWS, ROW_NOTES

loss = partial(Column, metric="final.loss", lower=True, digits=4, curve=False, part="loss")
score = partial(Column, factor=100, part="score, %")
_FOUR = ("launch.workers=4",)
"""ADE20K's 16 images are 4 on each worker."""
_LARGE = tuple(scale for scale in SCALES if scale != "smoke")

RECIPE = Recipe(
    name="table1",
    title="Vision",
    text="Validation loss: cross-entropy, and the Chamfer distance of Point-MAE on ShapeNet. "
    "Scores: top-1 of ResNet-50 and ViT, mean IoU of UperNet, accuracy of an SVM on frozen "
    "features of Point-MAE. " + ROW_NOTES,
    rows=ALL_ROWS,
    columns=(
        loss("ResNet-50, loss", ("task=resnet50",), without=ADAM_ONLY, scales=_LARGE),
        loss("ViT, loss", ("task=vit",)),
        loss("ADE20K, loss", ("task=ade20k",), without_large=ADAM_ONLY, paper=_FOUR),
        loss("ShapeNet, loss", ("task=shapenet",)),
        score("ResNet-50", ("task=resnet50",), "final.top1", without=ADAM_ONLY, scales=_LARGE),
        score("ViT", ("task=vit",), "final.top1"),
        score("ADE20K", ("task=ade20k",), "final.miou", without_large=ADAM_ONLY, paper=_FOUR),
        score("ShapeNet", ("task=shapenet",), "final.svm_accuracy"),
    ),
    tuned=True,
)
