"""The layers and blocks of `eflax.layers` as Flax Linen modules, through `flax.nnx.bridge`.

    layer = linen.EFLA(width=128, num_heads=4)
    variables = layer.init(jax.random.key(0), x)
    y, state = layer.apply(variables, x)
    y, state = layer.apply(variables, x, state)  # goes on where the first call stopped

    block = linen.Block(linen.EFLA(width=128, num_heads=4))  # with norms and a SwiGLU around it, called like a layer
    y = linen.SwiGLU(width=128).apply(variables, x)

Arguments are those of the NNX module, but for `rngs`, which Linen brings along; `name` is Linen's. Calls take and
return what the NNX layer's do, its explicit state too: there are no collections besides "params". Other methods go by
`nnx_method`: ``layer.apply(variables, batch_size, nnx_method="init_state")``.

The parameters are the same tree on both sides, and move by `params_of` and `load_params`:

    variables = {"params": params_of(nnx_layer)}
    load_params(nnx_layer, variables["params"])
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from flax import nnx
from flax.core import FrozenDict, meta
from jax.tree_util import keystr, tree_leaves_with_path

from eflax import layers


class Mixer(nnx.bridge.ToLinen):
    """An NNX layer or block as a Linen module that takes all of its parameters and no others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the NNX layer, or another method of it that `nnx_method` names.

        Raises:
            ValueError: a parameter is missing, unknown, or of another shape. The bridge alone would draw what is
                missing anew, and take the others.
        """
        if not self.is_initializing():
            made = nnx.eval_shape(lambda: self.nnx_class(*self.args, **self.kwargs, rngs=nnx.Rngs(0)))
            _check(params_of(made), self.variables.get("params", {}), type(made).__name__)
        return super().__call__(*args, **kwargs)


def _linen(layer: Callable[..., nnx.Module], *args: Any, name: str | None = None, **kwargs: Any) -> Mixer:
    return Mixer(layer, args=args, kwargs=FrozenDict(kwargs), name=name)


DeltaNet = partial(_linen, layers.DeltaNet)
EFLA = partial(_linen, layers.EFLA)
GatedDeltaNet = partial(_linen, layers.GatedDeltaNet)
GatedEFLA = partial(_linen, layers.GatedEFLA)
LinearAttention = partial(_linen, layers.LinearAttention)
Mamba = partial(_linen, layers.Mamba)
Mamba2 = partial(_linen, layers.Mamba2)
SoftmaxAttention = partial(_linen, layers.SoftmaxAttention)
SwiGLU = partial(_linen, layers.SwiGLU)


def Block(mixer: Mixer, *, name: str | None = None, **kwargs: Any) -> Mixer:
    """Return `eflax.layers.Block` as a Linen module.

    Args:
        mixer: a layer of this module, such as ``EFLA(width=128, num_heads=4)``. Its arguments alone are used: the
            parameters are the block's, under "mixer". Inside a compact method it takes an automatic name all the same.
        name: Linen's.
        **kwargs: those of the NNX block.
    """
    if not isinstance(mixer, Mixer):
        raise TypeError(
            f"mixer is of type {type(mixer).__name__} and must be a layer of eflax.linen, as linen.EFLA(...)"
        )
    return _linen(_block, mixer.nnx_class, mixer.args, mixer.kwargs, name=name, **kwargs)


def _block(layer: Any, args: Any, options: Any, *, rngs: nnx.Rngs, **kwargs: Any) -> layers.Block:
    return layers.Block(layer(*args, **options, rngs=rngs), **kwargs, rngs=rngs)


def params_of(module: nnx.Module) -> dict[str, Any]:
    """Return the parameters of an NNX module as Linen's "params": nested dicts of arrays, not copied."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def load_params(module: nnx.Module, params: Mapping[str, Any]) -> None:
    """Set the parameters of an NNX module to Linen's "params", boxed or not.

    Raises:
        ValueError: a parameter is missing, unknown, or of another shape; the module is then as it was.
    """
    _check(params_of(module), params, type(module).__name__)
    nnx.update(module, meta.unbox(dict(params)))


def _check(wanted: Mapping[str, Any], params: Mapping[str, Any], owner: str) -> None:
    """Raise ValueError where the trees differ in paths or shapes, naming each place."""
    want, have = (
        {keystr(path, simple=True, separator="/"): np.shape(x) for path, x in tree_leaves_with_path(tree)}
        for tree in (wanted, meta.unbox(params))
    )
    faults = [f"{path} is missing, it has shape {want[path]}" for path in want.keys() - have.keys()]
    faults += [f"{path} is unknown" for path in have.keys() - want.keys()]
    faults += [
        f"{path} has shape {have[path]} and needs {want[path]}"
        for path in want.keys() & have.keys()
        if want[path] != have[path]
    ]
    if faults:
        raise ValueError(f"params do not fit {owner}: " + "; ".join(sorted(faults)))
