"""Models: layers and cells put together for a task."""

from eflax.models.classifier import SequenceClassifier
from eflax.models.rlt import RLT, RLTConfig

__all__ = ["RLT", "RLTConfig", "SequenceClassifier"]
