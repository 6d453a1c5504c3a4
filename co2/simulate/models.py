"""Sizes of the models that the simulator knows, and what a step of them costs to compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    num_parameters: int
    unit: str
    """What is counted: tokens or images."""
    units_per_step: int
    """Of one GPU, unless told otherwise."""
    flops_per_unit: float
    """Forward and backward."""

    def step_s(self, units: float, peak_flops: float, mfu: float) -> float:
        """Seconds of a step: flops per unit × units / (peak × mfu).

        Args:
            units: tokens or images of one GPU in a step.
            peak_flops: flop/s of the GPU, as its vendor states them.
            mfu: model flops utilization, the share of the peak that training reaches.
        """
        return self.flops_per_unit * units / (peak_flops * mfu)


def _language(num_parameters: int, tokens: int = 480 * 1024 // 64) -> ModelShape:
    """6 flops per parameter and token: 2 forward, 4 backward; attention's own are left out
    (Kaplan et al., arXiv 2001.08361). Tokens: the CO2 paper's language models train on 480
    sequences of 1,024 tokens on 64 GPUs."""
    return ModelShape(num_parameters, "tokens", tokens, 6.0 * num_parameters)


MODELS = {
    "gpt2-small": _language(124_439_808),
    "gpt2-medium": _language(354_823_168),
    "gpt2-large": _language(774_030_080),
    "gpt2-xl": _language(1_557_611_200),
    "transnormer-385m": _language(385_000_000),
    "transnormer-1b": _language(1_000_000_000),
    "transnormer-7b": _language(7_000_000_000),
    "roberta-base": _language(124_697_433),
    "roberta-large": _language(355_412_057),
    # The CO2 paper's total batch of 8192, on 64 GPUs (assumed). 4.09e9 multiply-adds forward.
    "resnet50": ModelShape(25_557_032, "images", 128, 3 * 2 * 4.09e9),
    # An image is 197 tokens: 14 × 14 patches and the class.
    "vit-base": ModelShape(86_567_656, "images", 128, 6 * 86_567_656 * 197),
}
"""Parameters as timm and transformers count them; TransNormer's are the names' round figures,
within 2 % of what tasks/transnormer_model.py has with a vocabulary of 50257."""

GPUS = {"a100": 312e12, "h100": 989e12, "v100": 125e12}
"""Dense flop/s in bf16 (V100: fp16), from NVIDIA's data sheets."""

WIRE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one number on the wire."""
