"""Convert language models from flash-linear-attention and Hugging Face to eflax, and back."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from eflax.convert import Summary, export_folder, import_folder
from eflax.convert.folders import TOKENIZERS
from eflax.training import CheckpointError, RunFolderError


@dataclass(frozen=True)
class Import:
    """Turn config.json and safetensors of Hugging Face's layout into a folder of ours."""

    # The folder with config.json and model.safetensors, or several files and their index.
    source: Positional[Path]

    # A new folder, for experiments.language_model eval and generate.
    out: Positional[Path]

    # bytes, mistral-v1, or the path of a SentencePiece model or a tokenizer.json; by default that of the source.
    tokenizer: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None

    # Of products and activations when the model is used; by default bfloat16 where a tensor is. Parameters are float32.
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, arg(metavar="{float32,bfloat16}", help_behavior_hint="")
    ] = None

    # Keys of config.json that are not known here and do not change what the model computes.
    ignore: Annotated[tuple[str, ...], arg(metavar="KEY ...")] = ()

    def run(self) -> Summary:
        """Convert."""
        return import_folder(
            self.source, self.out, tokenizer=self.tokenizer, dtype=self.dtype, ignored=self.ignore
        )


@dataclass(frozen=True)
class Export:
    """Turn a run of experiments.language_model, or an imported folder, into config.json and safetensors."""

    # The folder of the run.
    source: Positional[Path]

    # A new folder, for flash-linear-attention's AutoModelForCausalLM.
    out: Positional[Path]

    # Of the tensors.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    # Take the parameters of the lowest validation loss, not the last ones.
    best: bool = False

    def run(self) -> Summary:
        """Convert."""
        return export_folder(self.source, self.out, dtype=self.dtype, best=self.best)


def main(args: Sequence[str] | None = None) -> int:
    """Convert; `args` are the command-line flags. Returns the exit code."""
    commands = {"import": Import, "export": Export}
    command = tyro.extras.subcommand_cli_from_dict(
        commands, args=args, prog="python -m eflax.convert", description=__doc__
    )
    try:
        summary = command.run()
    except KeyboardInterrupt:
        print(f"\nstopped; {command.out} was not written", file=sys.stderr)
        return 130
    except (ValueError, CheckpointError, RunFolderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config, dtypes = summary.config, ", ".join(summary.dtypes)
    layers = ", ".join(block.layer for block in config.pattern)
    print(f"{summary.parameters:,} parameters ({dtypes}), {config.num_layers} layers of {layers}")
    if summary.stream_scale != 1.0:
        print(
            f"The residual stream is {summary.stream_scale:.6g} times as large there, so that all norms have one "
            "epsilon; the outputs are the same up to rounding."
        )
    if summary.tokenizer is None:
        print(
            "There is no tokenizer: experiments.language_model needs one, import with --tokenizer (bytes, "
            "mistral-v1, or a file)."
        )
    elif isinstance(command, Export) and not any((command.out / name).is_file() for name in TOKENIZERS):
        print(f"The tokenizer, {summary.tokenizer}, is no file of theirs and was not written: keep its name.")
    print(f"Written: {command.out}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault(
        "JAX_PLATFORMS", "cpu"
    )  # a conversion needs no accelerator, and must not fill its memory
    sys.exit(main())
