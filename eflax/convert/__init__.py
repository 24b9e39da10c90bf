"""Checkpoints of flash-linear-attention and Hugging Face, to ours and back: ``python -m eflax.convert --help``.

A folder with config.json and safetensors of a DeltaNet, Gated DeltaNet, Mamba-2, linear-attention or softmax-attention
language model, or of a hybrid with softmax attention, becomes a folder that `experiments.language_model` evaluates and
samples from, and a run of that experiment, or such a folder, becomes one that flash-linear-attention loads. (Mamba-2
may be transformers' own as well.)

Parameters are float32 here. Their bfloat16 and float16 are held exactly, and float32 keeps its bytes, both ways.
What is not known is refused by name: kinds of models, options that are on, tensors too many, too few, or of another
shape or type. A folder appears when it is complete, and never in the place of another.
"""

from eflax.convert.errors import ConversionError
from eflax.convert.exchange import Summary, export_folder, import_folder
from eflax.convert.folders import is_imported, load_model, restore, save_model

__all__ = [
    "ConversionError",
    "Summary",
    "export_folder",
    "import_folder",
    "is_imported",
    "load_model",
    "restore",
    "save_model",
]
