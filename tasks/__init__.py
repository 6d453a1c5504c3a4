"""The tasks: model, data, loss and metrics of each experiment. Tasks know nothing of methods."""

from co2 import program

with program.starting(__name__):
    from co2.task import Batch, Task
    from tasks.ade20k.ade20k import ADE20K
    from tasks.glue.glue import GLUE
    from tasks.graph.graph import Graph
    from tasks.moe.moe import MoE
    from tasks.shapenet.shapenet import ShapeNet
    from tasks.text.gpt2 import GPT2
    from tasks.text.roberta import RoBERTa
    from tasks.text.transnormer import TransNormer
    from tasks.toy import Toy
    from tasks.vision.resnet50 import ResNet50
    from tasks.vision.vit import ViT

TASKS: dict[str, type[Task]] = {
    "ade20k": ADE20K,
    "glue": GLUE,
    "gpt2": GPT2,
    "graph": Graph,
    "moe": MoE,
    "roberta": RoBERTa,
    "shapenet": ShapeNet,
    "toy": Toy,
    "resnet50": ResNet50,
    "transnormer": TransNormer,
    "vit": ViT,
}

__all__ = ["TASKS", "Batch", "Task"]
