"""The kernels of S ← e^g (I − a k kᵀ) S + w k vᵀ, o = scale · Sᵀ q.

**A chunk as matrix products.** Token i adds a row to the decayed state, d_i along its key:

    S_i = e^{g_i} S_{i−1} + k_i d_iᵀ,      d_i = w_i v_i − a_i e^{g_i} S_{i−1}ᵀ k_i.

Let S enter a chunk of C = 64 tokens, c be the log-decays summed from its start, and Γ_ij = e^{c_i − c_j} what is left
at token i of what token j ≤ i wrote (0 where another document has begun). Then S_i = e^{c_i} S + Σ_{j≤i} Γ_ij k_j d_jᵀ,
so that the rows D [C, V] of the chunk solve a triangular system, and the rest are products. In matrices of a row a
token, where a vector ⊙ a matrix multiplies rows,

    T = (I + StrictTril(a ⊙ (K Kᵀ ⊙ Γ)))⁻¹,      P = scale · Tril(Q Kᵀ ⊙ Γ),
    D = T (w ⊙ V − a e^c ⊙ K S),      O = scale · e^c ⊙ Q S + P D,      S ← e^{c_C} S + (e^{c_C − c} ⊙ K)ᵀ D.

T and P know nothing of S: those of all chunks can be found at once. Without erasing (a = 0) T = I, and is left out.
`backward_states_sm90` and `backward_chunks_sm90` have the gradients of these lines, in the same letters: dX is that of
X, dR = Tᵀ dD that of what T multiplies, and P̄ and L̄ those of Q Kᵀ and a ⊙ K Kᵀ, before they are masked and decayed.

**On a Hopper GPU**, in the order of a call; `gpu` is the host's side of it, and `layout` has the plan of a call.

| module | what it finds | what runs side by side |
|---|---|---|
| `gates_sm90` | c, and the factors of rows (`layout.Gates`); after the others, the gradients of a, w and g | chunks |
| `solve_sm90` | T | chunks, one a warpgroup |
| `forward_sm90` | O, the final state; for the backward pass D, and S of each chunk | heads, 64 columns of S each |
| `backward_sm90` | all gradients, where keys and values have 128 entries and heads are many | heads, one a block |
| `backward_states_sm90` | elsewhere: dS and dR, from the last chunk to the first | as forward |
| `backward_chunks_sm90` | and then the gradients of the inputs | chunks |
| `segments` | S that enters, and dS that leaves, the parts of a long sequence | parts, like sequences |
| `passage_sm90` | for it: S from part to part, where there is erasing | heads, 64 columns of S each |
| `decode_sm90` | up to 8 tokens, without chunks, the state in place; `decode` is the host's side | columns of S |

A block reads of a state that enters only the part that it also writes of the one that leaves, and reads it first: in a
loop over layers that carries all states, XLA gives both the same memory.

A warpgroup is 128 threads that multiply matrices together. In a block some compute and one loads ahead of them:
`stream_sm90` for the kernels that carry S or dS; `chunk_roles_sm90` for `backward_chunks_sm90`; and for `backward_sm90`
`backward_block_sm90`, `backward_loader_sm90` and `backward_worker_sm90`.

**On a TPU** `tpu` is the host's side of `forward_tpu` and `backward_tpu`, which walk the chunks of several heads and
find T on the way (`inverse_tpu`); `gates` finds c and the factors before, in plain XLA; `tiles_tpu` tells how heads
share a matrix unit; `decode_tpu` is for a few tokens.
"""
