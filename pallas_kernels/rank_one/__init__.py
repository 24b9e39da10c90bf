"""The kernels of S ← e^g (I − a k kᵀ) S + w k vᵀ, o = scale · Sᵀ q: read `gpu`, then the device files."""
