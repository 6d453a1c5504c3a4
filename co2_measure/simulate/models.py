"""The sizes of the models that the simulator knows, and what a step of them costs to compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The size of a model, and the work of a step."""

    num_parameters: int
    unit: str
    """What throughput counts: tokens or images."""
    units_per_step: int
    """Of one GPU, where the command line gives no other number."""
    flops_per_unit: float
    """Floating-point operations of the forward and the backward pass for one unit."""


def _language(num_parameters: int, tokens: int = 480 * 1024 // 64) -> ModelShape:
    """A language model. A token costs 6 flops per parameter, 2 forward and 4 backward; those of
    attention itself are left out (Kaplan et al., arXiv 2001.08361). The default of `tokens` is the
    CO2 paper's: its language models train on 480 sequences of 1,024 tokens on 64 GPUs."""
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
"""Models by name. Parameters are as timm and transformers count them; TransNormer's are the round
figures of the names, within 2 % of tasks/text/transnormer_model.py with a vocabulary of 50257."""

WIRE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one number on the wire."""
