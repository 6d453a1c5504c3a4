"""The inner learning rate as a pure function of the step."""

import bisect
import math

from torch.optim import Optimizer

from co2.config import OptimConfig, Schedule


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """The schedule's share of the peak rate in the step with this index, counted from 0.

    A linear warm-up ends at index `warmup_steps` − 1. After it the share is 1, or follows a cosine
    or (1 − x)^power that would reach `min_lr_ratio` at index `steps`; or it falls in stairs: by
    `decay_rate` at every `decay_every`-th step after the warm-up (exponential), or by `gamma` at
    each index in `milestones` (step).
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return 1.0
    if optim.schedule is Schedule.exponential:
        assert optim.decay_every is not None, "OptimConfig checks it"
        return optim.decay_rate ** ((step - optim.warmup_steps) // optim.decay_every)
    if optim.schedule is Schedule.step:
        return optim.gamma ** bisect.bisect_right(optim.milestones, step)
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    if optim.schedule is Schedule.cosine:
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = (1 - done) ** optim.power
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left


def set_lr(optimizer: Optimizer, optim: OptimConfig, step: int, steps: int) -> None:
    """Give every parameter group its rate for the step with this index."""
    share = learning_rate(step, optim, steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def largest_lr(optimizer: Optimizer, optim: OptimConfig, steps: int, step: int) -> float:
    """The largest rate of any parameter group in the step with this index.

    Past the last step the last step's rate counts: a method may prepare a round that nobody trains.
    """
    share = learning_rate(min(step, steps - 1), optim, steps)
    return max(group["initial_lr"] * share for group in optimizer.param_groups)
