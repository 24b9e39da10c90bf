"""The kernels of h ← e^{dt A} ⊙ h + (dt x) Bᵀ, y = h C: read `gpu` or `tpu`, then the device files."""
