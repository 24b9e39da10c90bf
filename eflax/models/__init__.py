"""Models: layers and cells put together for a task."""

from eflax.layers.signatures import tell_signatures
from eflax.models.classifier import SequenceClassifier
from eflax.models.configs import CONFIG_NAMES, BlockConfig, LanguageModelConfig, named_config
from eflax.models.language_model import LanguageModel
from eflax.models.rlt import RLT, RLTConfig

tell_signatures(RLT, LanguageModel, SequenceClassifier)

__all__ = [
    "CONFIG_NAMES",
    "RLT",
    "BlockConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "RLTConfig",
    "SequenceClassifier",
    "named_config",
]
