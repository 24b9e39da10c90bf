"""What the tests of the layers are parametrised over."""

import jax
import jax.numpy as jnp
from flax import nnx

from eflax.layers import LAYERS

WIDTH = 16
SMALL = {name: {"num_heads": 2} for name in LAYERS} | {
    "mamba": {"state_dim": 4},
    "mamba2": {"num_heads": 4, "num_groups": 2, "state_dim": 8},
    "transformer": {"num_heads": 4, "num_kv_heads": 2, "max_length": 64},
}
RECURRENT = [name for name in LAYERS if name != "transformer"]
EXEMPT = {  # parameters without weight decay, which are float32 whatever the policy, by their last name
    "linear-attention": {"scale"},
    "mamba": {"A_log", "D", "bias", "dt_bias"},
    "mamba2": {"A_log", "D", "bias", "dt_bias", "scale"},
    "deltanet": {"scale"},
    "gated-deltanet": {"A_log", "dt_bias", "scale"},
    "efla": {"scale"},
    "gated-efla": {"A_log", "dt_bias", "scale"},
    "transformer": set(),
}
assert EXEMPT.keys() == LAYERS.keys(), "name in EXEMPT what each layer of LAYERS leaves free of weight decay"


def make(name, *, seed=0, **options):
    """A small layer. Step by step unless a form is asked for: quicker to compile; the cells' tests compare forms."""
    form = {} if name == "transformer" else {"form": "recurrent"}
    return LAYERS[name](WIDTH, **SMALL[name] | form | options, rngs=nnx.Rngs(seed))


def tokens(time, batch=2, seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (batch, time, WIDTH)).astype(dtype)


@nnx.jit
def call(layer, x, state=None, segment_ids=None):
    return layer(x, state, segment_ids)


def parameters(module):
    """Path to array, of every parameter."""
    return {
        tuple(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
