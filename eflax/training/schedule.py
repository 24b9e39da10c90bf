"""The learning rate over a training."""

import optax


def warmup_cosine(peak: float, *, start: float, end: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """Return the schedule that goes linearly from `start` to `peak`, then along half a cosine to `end`.

    Args:
        peak: learning rate after the warm-up.
        start: of step 0.
        end: from the last step on.
        warmup_steps: to get from start to peak; 0 begins at the peak.
        steps: of the whole training, the warm-up included.

    Raises:
        ValueError: the warm-up does not end before the training.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"a warm-up of {warmup_steps} steps does not fit into a training of {steps}; make one of them fit"
        )
    return optax.schedules.warmup_cosine_decay_schedule(start, peak, warmup_steps, steps, end)


def steps_for_tokens(tokens: int, tokens_per_step: int) -> int:
    """Return how many steps see at least so many tokens."""
    return -(-tokens // tokens_per_step)
