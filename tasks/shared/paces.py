"""How fast public programs train such models: what `co2 plan` takes for a task, with its source.

A share is of the GPU's peak in bf16 or fp16, of the model's own operations (PaLM's MFU).
"""

from co2.task import Pace

PICTURES_PER_S = 460.0
"""Pictures that a loading process decodes, crops and flips: results/loading.md."""
AUGMENTED_PER_S = 200.0
"""The same with RandAugment, erasing and mixing (python -m benchmarks.loading)."""
CONVOLUTIONS = Pace(
    0.2,
    "NVIDIA/DeepLearningExamples, ResNet-50 v1.5 in PyTorch: 2,470 pictures a second on an A100",
)
PICTURES = Pace(0.2, "Touvron et al. (2021): DeiT-B, 300 epochs in 53 hours on 8 V100")
TEXT = Pace(
    0.3,
    "karpathy/nanoGPT: GPT-2 124M, 295 billion tokens in about 4 days on 8 A100; the same on an "
    "H200, results/gpu.md",
)
LARGE_TEXT = Pace(
    0.4, "Touvron et al. (2023), LLaMA 7B: 10^12 tokens in 82,432 hours of an A100, 0.43"
)
UNKNOWN = Pace(0.2, "no figure of such a model is known: as convolutions")
