"""Check of `eflax.convert` against flash-linear-attention itself, on a GPU with torch, transformers and that library.

    python -m experiments.convert_check

For each kind of model it builds a random one there, saves it, imports it, and compares logits and greedy text, in
float32 (as far as their kernels go: 64 tokens) and bfloat16; exports it again and compares the tensors bit for bit;
and exports a model of ours, loads it there, and compares logits. One line for each comparison; the exit code is 1 if
one fails. Their kernels run as first configured: to tune them takes minutes, and speed is not compared here.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same device

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from tyro.conf import arg

from eflax.convert import export_folder, import_folder, load_model, save_model
from eflax.models import LanguageModel, named_config
from eflax.models.language_model_generate import Generator

VOCABULARY, LAYERS = 1000, 4
SIZES = {  # arguments of their configurations, which are otherwise at their defaults
    "delta_net": {"num_heads": 8},
    "gated_deltanet": {"num_heads": 4, "head_dim": 64, "num_v_heads": 8},
    "mamba2": {"head_dim": 64},
    "linear_attn": {"num_heads": 8},
}
CONFIGS = {
    "delta_net": ("DeltaNetConfig", "deltanet-tiny"),
    "gated_deltanet": ("GatedDeltaNetConfig", "gated-deltanet-tiny"),
    "mamba2": ("Mamba2Config", "mamba2-tiny"),
    "linear_attn": ("LinearAttentionConfig", "linear-attention-tiny"),
}
# RMS(ours - theirs) / RMS(theirs) of logits: float32 leaves room for sums in another order, over four layers. In
# bfloat16 both have errors of their own, so the limit is this many times their distance from float32 products.
FLOAT32, TIMES = 1e-4, 2.0
MARGIN = 4.0  # our choice may be worth less to their model than its own by this many times the limit
PROMPT, LENGTHS = 32, {"float32": 64, "bfloat16": 256}  # their chunked delta rule refuses float32


@dataclass(frozen=True)
class Flags:
    """Compare imported and exported models with flash-linear-attention's own."""

    # Kinds of models.
    models: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = tuple(SIZES)

    # Of the models there.
    width: int = 512

    # Tokens of greedy text.
    tokens: int = 64

    # Of models and tokens.
    seed: int = 0

    # Where torch computes.
    device: str = "cuda"


class Check:
    """The comparisons of one kind of model."""

    def __init__(self, name: str, flags: Flags, folder: Path) -> None:
        self.name, self.flags, self.folder = name, flags, folder
        self.torch: Any = import_module("torch")
        self.transformers: Any = import_module("transformers")
        self.models: Any = import_module("fla.models")
        self.ids = np.random.default_rng(flags.seed).integers(0, VOCABULARY, (2, max(LENGTHS.values())))

    def run(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the name of each comparison, whether it passed, and what was measured."""
        theirs = self.build()
        for dtype in LENGTHS:
            saved, ours, again = (self.folder / f"{kind}-{dtype}" for kind in ("theirs", "ours", "again"))
            theirs = theirs.to(getattr(self.torch, dtype))
            theirs.save_pretrained(saved)
            import_folder(saved, ours)
            precision = "highest" if dtype == "float32" else None
            with jax.default_matmul_precision(precision):
                passed, limit, detail = self.compare_logits(theirs, ours, dtype)
                yield f"{dtype} logits", passed, detail
                yield f"{dtype} text", *self.compare_text(theirs, load_model(ours, dtype=dtype), dtype, limit)
            export_folder(ours, again, dtype=dtype)
            yield f"{dtype} tensors", *self.compare_tensors(theirs, again, dtype)
        yield "native float32 logits", *self.compare_native()

    def build(self) -> Any:
        """Return a model of theirs whose scales and biases are random, too."""
        self.torch.manual_seed(self.flags.seed)
        shape = {"vocab_size": VOCABULARY, "hidden_size": self.flags.width, "num_hidden_layers": LAYERS}
        config = getattr(self.models, CONFIGS[self.name][0])(**shape, **SIZES[self.name])
        model = self.transformers.AutoModelForCausalLM.from_config(config).to(self.flags.device).eval()
        with self.torch.no_grad():
            for parameter in model.parameters():
                size = 0.1 if parameter.ndim == 1 else 0.02
                parameter.add_(size * self.torch.randn_like(parameter))
        return model

    def load(self, folder: Path, dtype: str) -> Any:
        """Return a model that their library loads."""
        found = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(self.torch, dtype), output_loading_info=True
        )
        model, info = found
        if wrong := {key: value for key, value in info.items() if value}:
            raise ValueError(f"transformers reports {wrong}")
        return model.to(self.flags.device).eval()

    def their_logits(self, model: Any, ids: np.ndarray, **options: Any) -> tuple[np.ndarray, Any]:
        """Return the logits of a model of theirs, and its state."""
        with self.torch.no_grad():
            found = model(self.torch.tensor(ids, device=self.flags.device), **options)
            return found.logits.float().cpu().numpy(), found.past_key_values

    def compare_logits(self, theirs: Any, folder: Path, dtype: str) -> tuple[bool, float, str]:
        """Compare the logits of random tokens; returns the limit, too."""
        ids = self.ids[:, : LENGTHS[dtype]]
        reference, _ = self.their_logits(theirs, ids, use_cache=False)
        found, limit, detail = our_logits(load_model(folder, dtype=dtype), ids), FLOAT32, ""
        error = ratio(found, reference)
        if dtype != "float32":
            with jax.default_matmul_precision("highest"):
                exact = our_logits(load_model(folder, dtype="float32"), ids)
            limit = TIMES * ratio(reference, exact)
            detail = f"; ours {ratio(found, exact):.2e} and theirs {limit / TIMES:.2e} from float32"
        return error <= limit, limit, f"{error:.2e} of {limit:.2e}{detail}"

    def compare_text(self, theirs: Any, ours: LanguageModel, dtype: str, limit: float) -> tuple[bool, str]:
        """Check that each token of our greedy text is their model's choice, too, given the text before it.

        Their choice is that of their forward pass over the whole text. How far their token by token decoding is from
        it, is told, and not judged.
        """
        prompt = self.ids[:, :PROMPT]
        tokens = min(self.flags.tokens, LENGTHS[dtype] - PROMPT)
        found = np.array(Generator(ours, chunk_size=PROMPT)(prompt.tolist(), tokens))
        text = np.concatenate([prompt, found[:, :-1]], axis=1)
        logits = self.their_logits(theirs, text, use_cache=False)[0][:, PROMPT - 1 :]
        chosen = np.take_along_axis(logits, found[..., None], axis=2)[..., 0]
        margins = (logits.max(-1) - chosen) / np.sqrt(np.mean(logits**2))
        detail = f"{np.sum(margins == 0)} of {margins.size} tokens are their choice"
        if margins.any():
            detail += f", the others by at most {margins.max():.2e} of the logits' RMS"
        off = ratio(self.their_steps(theirs, text)[:, PROMPT - 1 :], logits)
        return bool(np.all(margins <= MARGIN * limit)), f"{detail}; their decoding is {off:.2e} from it"

    def their_steps(self, model: Any, ids: np.ndarray) -> np.ndarray:
        """Return the logits of a model of theirs with the prompt at once, then token by token."""
        first, state = self.their_logits(model, ids[:, :PROMPT], use_cache=True)
        steps = [first]
        for t in range(PROMPT, ids.shape[1]):
            logits, state = self.their_logits(model, ids[:, t : t + 1], past_key_values=state, use_cache=True)
            steps.append(logits)
        return np.concatenate(steps, axis=1)

    def compare_tensors(self, theirs: Any, folder: Path, dtype: str) -> tuple[bool, str]:
        """Compare the tensors of a model that came back."""
        back, before = self.load(folder, dtype).state_dict(), theirs.state_dict()
        equal = [name for name in before if name in back and self.torch.equal(before[name], back[name])]
        passed = len(equal) == len(before) == len(back)
        return passed, f"{len(equal)} of {len(before)} came back bit for bit"

    def compare_native(self) -> tuple[bool, str]:
        """Compare the logits of a new model of ours with those that their library computes from its export."""
        config = named_config(CONFIGS[self.name][1], vocab_size=VOCABULARY)
        ours = LanguageModel(config, rngs=nnx.Rngs(self.flags.seed))
        save_model(ours, self.folder / "native")
        summary = export_folder(self.folder / "native", self.folder / "exported")
        ids = self.ids[:, : LENGTHS["float32"]]
        reference, _ = self.their_logits(self.load(self.folder / "exported", "float32"), ids, use_cache=False)
        with jax.default_matmul_precision("highest"):
            error = ratio(our_logits(ours, ids), reference)
        return error <= FLOAT32, f"{error:.2e} of {FLOAT32:.2e}; stream times {summary.stream_scale:g}"


@nnx.jit
def forward(model: LanguageModel, tokens: Any) -> Any:
    """Return logits."""
    return model.logits(model.hidden(tokens)[0])


def our_logits(model: LanguageModel, ids: np.ndarray) -> np.ndarray:
    """Return the logits of a model of ours."""
    return np.asarray(forward(model, jnp.asarray(ids, jnp.int32)))


def ratio(found: np.ndarray, reference: np.ndarray) -> float:
    """Return RMS(found - reference) / RMS(reference); NaN where one of them has any."""
    return float(np.sqrt(np.mean((found - reference) ** 2) / np.mean(reference**2)))


def leave_untuned() -> None:
    """Let Triton know one configuration of each kernel, the first, of those defined from now on."""
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner
    initialise = tuner.__init__

    def with_first(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        initialise(self, fn, arg_names, configs[:1], *rest, **options)

    tuner.__init__ = with_first


def main(args: Sequence[str] | None = None) -> int:
    """Compare; `args` are the command-line flags. Returns the exit code."""
    flags = tyro.cli(Flags, args=args, prog="python -m experiments.convert_check")
    if flags.device == "cuda":
        leave_untuned()
    failed, began = [], time.perf_counter()
    for name in flags.models:
        try:
            with TemporaryDirectory() as folder:
                for what, passed, detail in Check(name, flags, Path(folder)).run():
                    word = "ok  " if passed else "FAIL"
                    print(
                        f"{word} {name}, {what}: {detail} ({time.perf_counter() - began:.0f} s)", flush=True
                    )
                    failed += [] if passed else [f"{name}, {what}"]
        except Exception:  # of any kind, theirs too: the other models are worth comparing all the same
            traceback.print_exc()
            print(f"FAIL {name}: stopped by the error above", flush=True)
            failed.append(name)
    print(f"failed: {'; '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
