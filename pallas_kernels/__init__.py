"""Accelerator kernels in Pallas. A folder per kernel family; device files end in their architecture (_sm90, _tpu)."""
