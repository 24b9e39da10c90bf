"""Models: layers and cells put together for a task."""

from eflax.models.classifier import SequenceClassifier

__all__ = ["SequenceClassifier"]
