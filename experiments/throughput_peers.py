"""Other people's implementations of the same recurrences, timed on the same inputs where they are installed."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from eflax.evaluation.agreement import worst_error
from eflax.training.run_folder import package_version
from experiments.timing import seconds_per_call

PEERS = LOOP, FLA, FLASH_QLA = "torch-loop", "fla", "flash_qla"

PACKAGES = {
    LOOP: ("torch",),
    FLA: ("flash-linear-attention", "torch", "triton"),
    FLASH_QLA: ("flash-qla", "tilelang", "torch"),
}

type Peer = Callable[..., tuple[Any, Any]]


class PeerResult(NamedTuple):
    """A peer's name, its error against the reference, and its median time; or what it raised instead."""

    peer: str
    error: float = 0.0
    seconds: float = 0.0
    refusal: str = ""


def peer_versions(wanted: tuple[str, ...]) -> dict[str, str]:
    """The packages that these peers are made of, with their versions, or "not installed"."""
    return {package: package_version(package) for peer in wanted for package in PACKAGES[peer]}


def peer_results(
    wanted: tuple[str, ...],
    name: str,
    task: str,
    inputs: dict[str, Array],
    weights: PyTree,
    reference: PyTree,
    repeats: int,
    memory_limit: float,
) -> Iterator[PeerResult]:
    """Run every wanted and installed peer of a cell; on the GPU where torch has one, else on the CPU.

    The loop is left out where its autograd graph, several states for every token, would need more than
    `memory_limit` GB.
    """
    peers = installed_peers(name, inputs["q"].dtype.name) if "q" in inputs else {}
    for label, peer in peers.items():
        states = inputs["k"].size * inputs["v"].shape[-1] * 4 * 4 / 1e9
        if label not in wanted or (label == LOOP and task != "forward" and states > memory_limit):
            continue
        run, synchronize = prepare(peer, task, inputs, weights)
        try:
            error = worst_error(run(), reference)
            seconds = seconds_per_call(lambda run=run: run(fetch=False), synchronize, repeats)
        except Exception as refusal:  # theirs, of any type: the other rows are worth having all the same
            yield PeerResult(label, refusal=f"{type(refusal).__name__}: {refusal}".splitlines()[0])
        else:
            yield PeerResult(label, error, seconds)


def installed_peers(name: str, dtype: str) -> dict[str, Peer]:
    """Peers of a cell on this machine: label → function of torch tensors by argument name → (o, final state)."""
    if find_spec("torch") is None:
        return {}
    torch = import_module("torch")

    loops = {"delta_rule": torch_loop, "gated_delta_rule": torch_loop, "ssd": torch_loop}
    loops["efla"] = partial(torch_loop, exact=True)
    peers: dict[str, Peer] = {LOOP: loops[name]} if name in loops else {}
    if torch.cuda.is_available() and find_spec("fla") is not None and dtype != "float32":
        kernels = fla_kernels()
        peers |= {FLA: kernels[name]} if name in kernels else {}
    if torch.cuda.is_available() and find_spec("flash_qla") is not None and name == "gated_delta_rule":
        kernel = import_module("flash_qla").chunk_gated_delta_rule
        peers[FLASH_QLA] = lambda q, k, v, beta, g: kernel(
            q, k, v, g, beta, scale=1.0, output_final_state=True
        )
    return peers


def fla_kernels() -> dict[str, Peer]:
    """Chunked Triton kernels of flash-linear-attention; EFLA is its delta rule with α as the gate."""
    delta_rule = import_module("fla.ops.delta_rule").chunk_delta_rule
    gated_delta_rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
    options = {"scale": 1.0, "output_final_state": True}
    return {
        "delta_rule": lambda q, k, v, beta: delta_rule(q, k, v, beta, **options),
        "efla": lambda q, k, v, beta: delta_rule(q, k, v, alpha(k, beta), **options),
        "gated_delta_rule": lambda q, k, v, beta, g: gated_delta_rule(q, k, v, g, beta, **options),
        "ssd": lambda q, k, v, g: simple_gla(q, k, v, g=g, **options),
    }


def prepare(
    peer: Peer, task: str, inputs: dict[str, Array], weights: PyTree
) -> tuple[Callable[..., PyTree], Callable[[Any], None]]:
    """Return what runs the task once (and fetches its results as NumPy trees), and what waits for the device."""
    torch = import_module("torch")

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor_of(x: Array) -> Any:
        return torch.from_numpy(np.array(x, np.float32)).to(device, getattr(torch, x.dtype.name))

    tensors = {argument: tensor_of(x) for argument, x in inputs.items()}
    cotangents = [tensor_of(x) for x in jax.tree.leaves(weights)]
    for tensor in tensors.values():
        tensor.requires_grad_(task != "forward")

    def run(fetch: bool = True) -> PyTree:
        o, state = peer(**tensors)
        if task == "forward":
            return o.detach().float().cpu().numpy() if fetch else None
        weighted = {"gradient": [o], "state-gradient": [state], "full-gradient": [o, state]}[task]
        needed = [x for argument, x in tensors.items() if task != "state-gradient" or argument != "q"]
        grads = torch.autograd.grad(weighted, needed, cotangents)
        if not fetch:
            return None
        arrays = iter(grad.float().cpu().numpy() for grad in grads)
        zero = np.zeros(inputs["q"].shape, np.float32)
        return {name: zero if task == "state-gradient" and name == "q" else next(arrays) for name in tensors}

    return run, lambda _: torch.cuda.synchronize() if device == "cuda" else None


def alpha(k: Any, beta: Any) -> Any:
    """EFLA's α in torch, in float32: (1 − e^{−βλ}) / λ, and β where λ vanishes."""
    torch = import_module("torch")

    norm = k.float().square().sum(-1)
    safe = norm.clamp_min(1e-12)
    return torch.where(norm > 1e-12, -torch.expm1(-beta * safe) / safe, beta)


def torch_loop(
    q: Any, k: Any, v: Any, beta: Any = None, g: Any = None, *, exact: bool = False
) -> tuple[Any, Any]:
    """A loop over time, as the released sequential-MNIST script of EFLA is written."""
    torch = import_module("torch")

    gate = alpha(k, beta) if exact else beta
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]).float(), []
    for t in range(q.shape[1]):
        k_t, row = k[:, t].float(), v[:, t].float()
        if g is not None:
            state = state * g[:, t].exp()[..., None, None]
        if gate is not None:
            row = gate[:, t, :, None] * (row - (state * k_t[..., None]).sum(-2))
        state = state + k_t[..., None] * row[..., None, :]
        outputs.append((state * q[:, t].float()[..., None]).sum(-2))
    return torch.stack(outputs, dim=1).to(v.dtype), state
