"""Evaluation: how well a trained model does, also where its input is not what it was trained on."""

from eflax.evaluation.perturbations import FAMILIES, Family
from eflax.evaluation.robustness import count_correct

__all__ = ["FAMILIES", "Family", "count_correct"]
