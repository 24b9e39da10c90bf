"""A training step of a language model of flash-linear-attention, timed in a process of its own.

`experiments.language_model_throughput` starts it, as `python -m experiments.language_model_fla REQUEST RESULT`, with
the arguments of `measure` in one JSON file; the other gets what it returns. It needs torch, transformers,
flash-linear-attention and a GPU, and nothing of JAX, so that the memory it measures is its own.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps; the first one tries and compiles the kernels


def measure(
    config: dict[str, Any], batch_size: int, length: int, steps: int, device: str = "cuda"
) -> dict[str, Any]:
    """Return what a step takes, on random tokens, with the parameters, moments and products in bfloat16.

    Their model in training as their defaults have it: kernels "chunk", norms, SwiGLU and cross-entropy fused, nothing
    computed again in the backward pass. The optimizer is torch's fused AdamW behind clipping by the global norm.

    Args:
        config: config.json of the model.
        batch_size: sequences in a batch.
        length: tokens of each.
        steps: that are timed.
        device: of torch.
    """
    torch: Any = import_module("torch")
    models: Any = import_module("transformers")
    import_module("fla.models")  # which tells transformers of its own
    torch.manual_seed(0)
    model = models.AutoModelForCausalLM.from_config(models.AutoConfig.for_model(**config))
    model = model.to(device, torch.bfloat16).train()
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    tokens = torch.randint(config["vocab_size"], (batch_size, length), device=device)

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for all of it

    _, warm_up = timed(step, WARM_UP)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss, times = timed(step, steps)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "warm_up": sum(warm_up),
        "seconds": statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "loss": loss,
        "versions": ", ".join(
            f"{name} {import_module(name).__version__}" for name in ("fla", "torch", "triton")
        ),
    }


def timed(step: Callable[[], float], count: int) -> tuple[float, list[float]]:
    """Return the last loss, and the seconds of each of so many steps."""
    loss, times = 0.0, []
    for _ in range(count):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
    return loss, times


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(Path(sys.argv[1]).read_text()))))
