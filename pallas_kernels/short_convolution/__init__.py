"""Causal depthwise convolution of few taps, then SiLU: y_t = silu(Σ_s kernel[-1 - s] · x_{t-s} (+ bias)).

`formula` is that in plain XLA, `gpu` the host's side of the kernels, then come the device files.
"""
