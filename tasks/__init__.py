"""What is trained: model, data, loss and metrics of each experiment. Knows nothing of methods."""

from tasks.base import Batch, Task
from tasks.gpt2 import GPT2
from tasks.toy import Toy

TASKS: dict[str, type[Task]] = {"gpt2": GPT2, "toy": Toy}

__all__ = ["TASKS", "Batch", "Task"]
