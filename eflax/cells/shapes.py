"""The axis letters, and the named shapes of the arrays that the cells take.

| letter | axis |
|---|---|
| B | batch: independent sequences |
| T | time: the tokens of a sequence |
| H | key heads |
| HV | value heads, a multiple of H; each group of HV / H of them shares a key head |
| K, V | width of a key (and query), width of a value |
| C, N | in chunkwise forms: tokens in a chunk, chunks in a sequence |
| D, N | in the selective SSM: channels, state entries of a channel |

A state S is a K × V matrix per head that answers a query by o = Sᵀ q.
"""

from jax import Array
from jaxtyping import Bool, Float, Int

Queries = Float[Array, "B T H K"]
Keys = Float[Array, "B T H K"]
Values = Float[Array, "B T HV V"]
Gates = Float[Array, "B T HV"]
SegmentIds = Int[Array, "B T"]
Restarts = Bool[Array, "B T"]
States = Float[Array, "B HV K V"]
Normalisers = Float[Array, "B HV K"]
Scale = float | Float[Array, ""]

TokenQuery = Float[Array, "B H K"]
TokenKey = Float[Array, "B H K"]
TokenValue = Float[Array, "B HV V"]
TokenGate = Float[Array, "B HV"]
