"""The recurrences, as pure functions on arrays: no parameters, no framework.

    o, final_state = cells.efla(q, k, v, beta)
    state, o_t = cells.efla.step(state, q_t, k_t, v_t, beta_t)

| cell | update of the state S [K, V] | read-out |
|---|---|---|
| `linear_attention(q, k, v)` | S ← S + k vᵀ, z ← z + k | Sᵀq / (zᵀq + eps) |
| `ssd(q, k, v, g)` | S ← e^g S + k vᵀ | Sᵀq |
| `delta_rule(q, k, v, beta)` | S ← (I − β k kᵀ) S + β k vᵀ | Sᵀq |
| `gated_delta_rule(q, k, v, beta, g)` | S ← e^g (I − β k kᵀ) S + β k vᵀ | Sᵀq |
| `efla(q, k, v, beta)` | S ← (I − α k kᵀ) S + α k vᵀ, α = (1 − e^{−βλ}) / λ, λ = ‖k‖² | Sᵀq |
| `gated_efla(q, k, v, beta, g)` | S ← e^ℓ (I − a k kᵀ) S + w k vᵀ, (a, w, ℓ) by variant | Sᵀq |
| `selective_ssm(x, dt, A, B, C)` | h ← e^{dt A} ⊙ h + dt x Bᵀ (h [D, N]) | h C |

**Arrays.** q, k [B, T, H, K]; v, o [B, T, HV, V]; beta, g [B, T, HV]; S [B, HV, K, V]. g is a *log* decay, ≤ 0. HV
is a multiple of H: value head i uses key head i // (HV / H). Keys and queries are used as given; normalising them is
the caller's business. Inputs may be bfloat16, float16, float32, float64, also mixed; o has v's dtype, while states,
coefficients and decay sums are float32, or float64 where any input is (which JAX has with JAX_ENABLE_X64=1 only).

`help(cells.efla)` shows a cell with its own options: `order` (efla), `variant` (gated_efla), `normalize` and `eps`
(linear_attention, whose state is the pair (S, z) with z [B, HV, K]).

**Arguments of every cell** (selective_ssm has no `scale`, and its C is what q is to the others).
- `scale` multiplies q. It is 1 by default (flash-linear-attention's default is K^−½).
- `initial_state`: zeros if None. It belongs to the document of the first token.
- `segment_ids` [B, T]: integers that mark packed documents; the state restarts wherever the id changes, and no output
  or gradient passes a boundary. (Of finite numbers: see below.) `final_state` is the state after the last token.
- `form`: how to evaluate; all forms agree to rounding. None picks: one by one below 8 tokens, in chunks above,
  by kernels where they serve (but not for normalised linear_attention, where their gradient of q loses digits).

  | form | how | work | memory of the backward pass |
  |---|---|---|---|
  | "recurrent" | `lax.scan` over `step` | O(T K V), T steps | T states |
  | "associative" | `lax.associative_scan` over affine maps | O(T K² (K + V)) with erase | T maps and states |
  | "parallel" | one masked T × T matrix (a triangular solve with erase) | O(T² (K + V)) | T² |
  | "chunkwise" | parallel inside chunks, one affine map between them | O(T (C + K) (K + V)) | T / C states |
  | "pallas_gpu" | kernels for Hopper GPUs | as chunkwise, C = 64 | T / C states (16-bit), T × C inverses |
  | "pallas_tpu" | kernels for TPUs from v4 on | as chunkwise, C = 64 | T / C states and T × C inverses, in q's dtype |

  "pallas_gpu" needs q, k and v all in bfloat16 or all in float16, keys of at most 256 entries, and float32 states. Up
  to 8 tokens it is one kernel, float32 too, which `step` uses as well and which updates a donated state in place: for K
  a multiple of 32 and V of 16, and some more. selective_ssm's takes inputs of any 16- or 32-bit dtype and N ≤ 64, and
  keeps a state for 16 tokens. With float16, what is multiplied is float16 in the kernels, too: parts of states above
  65,504 are infinite, and rows w v below 6e-5 (so EFLA's of keys longer than 100) lose digits.
  "pallas_tpu" needs q, k and v all in bfloat16 or all in float32, keys and values of at most 256 entries, and float32
  states. Up to 8 tokens it is one kernel, as on GPUs, of states of any size. selective_ssm's takes bfloat16 and float32
  and N ≤ 256, and keeps a state for 64 tokens.
  Both are differentiable once, in reverse. Where jvp or second derivatives are needed, ask for "chunkwise" by name.
  Give "pallas_gpu" many sequences on the batch axis rather than by vmap: into how many parts it cuts each of them, to
  fill the card, it chooses without knowing of vmap. Under jax.checkpoint no kernel for more than 8 tokens runs twice if
  the policy keeps their residuals, as does `jax.checkpoint_policies.save_only_these_names(*RESIDUALS)` with RESIDUALS
  from `eflax.cells.forms.pallas`.
  In 16 bits both lose digits where edits turn round what they meet (a λ from 1 to 2: negative eigenvalues) and one key
  comes again and again: over 130 tokens outputs are off by 2 % at a λ = 1.5, by up to 20 % at 1.9, and at 2 by 24 %
  ("pallas_tpu") or more than they are worth ("pallas_gpu"), those of "chunkwise" by 0.2 % on a CPU.
- `chunk_size` C of the chunkwise form: changes cost, not results.
- `q = None` reads nothing out: o is None and only the final state is computed. A last read-out is then
  `cell.read(final_state, q_last)`.

**NaN and infinity** are never hidden: a token that holds one, or overflows, passes it on to the outputs after it. All
forms but `recurrent` also carry it past the end of its document, as zero times NaN is NaN; and those that mask a matrix
of tokens carry it to *earlier* outputs: `chunkwise` to those of its chunk, `parallel` to all of its sequence.
(`selective_ssm` has no such matrix, and its `pallas_tpu` stops at the document's end.) `pallas_tpu` works on
heads in pairs, and carries it to the other of its pair. `pallas_gpu` cuts long sequences of few heads into segments;
past the end of one it carries nothing of which decay leaves less than e^−24, be it NaN.

**Errors.** ValueError or TypeError naming the argument, before anything runs: ranks, sizes, head counts, dtypes,
g > 0 (where its values are known: not under jit), an unknown variant. `UnsupportedForm`, a ValueError, where a form
asked for by name does not exist for the cell, or cannot serve these inputs on this machine.

`CELLS` maps names to cells; `cell.arguments` and `cell.forms` say what each takes and how it can be evaluated.
`affine` is the algebra of state maps that the forms are built from.
"""

from eflax.cells import affine
from eflax.cells.checks import UnsupportedForm
from eflax.cells.delta_rule import delta_rule
from eflax.cells.efla import efla
from eflax.cells.gated_delta_rule import gated_delta_rule
from eflax.cells.gated_efla import gated_efla
from eflax.cells.linear_attention import linear_attention
from eflax.cells.selective_ssm import selective_ssm
from eflax.cells.ssd import ssd

CELLS = {
    cell.name: cell
    for cell in (linear_attention, ssd, selective_ssm, delta_rule, gated_delta_rule, efla, gated_efla)
}

__all__ = [
    "CELLS",
    "UnsupportedForm",
    "affine",
    "delta_rule",
    "efla",
    "gated_delta_rule",
    "gated_efla",
    "linear_attention",
    "selective_ssm",
    "ssd",
]
