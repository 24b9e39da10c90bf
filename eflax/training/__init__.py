"""Training: optimizer and train step, the loop, checkpoints, and the folder that a run writes into."""

from eflax.training.checkpoint import CheckpointError, Checkpoints
from eflax.training.interrupt import Interrupted, StopRequest
from eflax.training.loop import Diverged, Trainer
from eflax.training.run_folder import TRAINING, RunFolder, RunFolderError, read_config, read_records
from eflax.training.step import TrainState, TrainStep, adamw, cross_entropy, initial_state, make_train_step

__all__ = [
    "TRAINING",
    "CheckpointError",
    "Checkpoints",
    "Diverged",
    "Interrupted",
    "RunFolder",
    "RunFolderError",
    "StopRequest",
    "TrainState",
    "TrainStep",
    "Trainer",
    "adamw",
    "cross_entropy",
    "initial_state",
    "make_train_step",
    "read_config",
    "read_records",
]
