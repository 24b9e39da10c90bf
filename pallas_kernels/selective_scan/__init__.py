"""The kernels of h ← e^{dt A} ⊙ h + (dt x) Bᵀ, y = h C: read `gpu`, then the device files."""
