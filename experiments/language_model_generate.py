"""Text from a trained language model."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from eflax.data.tokenizers import Tokenizer
from eflax.models.language_model_generate import Generator, Sampling
from experiments import command
from experiments.command import FlagError, with_flags
from experiments.language_model_load import load_run

ARGUMENTS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "max_length")  # that are flags, too


@dataclass(frozen=True)
class Flags:
    """Continue prompts with a trained model. A single answer appears while it is being generated."""

    # The folder of a training run.
    run: Positional[Path]

    # One or several texts to continue, together.
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ("",)

    # Tokens to generate at most.
    max_tokens: int = 200

    # 0 takes the most likely token.
    temperature: float = 0.8

    # Keep the k most likely tokens; 0 keeps all.
    top_k: int = 0

    # Keep the most likely tokens that together have this probability.
    top_p: float = 0.95

    # Of the sampling.
    seed: int = 0

    # Tokens that states of softmax attention hold; by default those of a sequence in training.
    max_length: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None

    # Take the parameters of the lowest validation loss, not the last ones.
    best: bool = False

    @property
    def out(self) -> Path | None:
        """Nothing is written."""
        return None

    @property
    def resume(self) -> Path | None:
        """Nothing is resumed."""
        return None


def main(args: Sequence[str]) -> int:
    """Generate; `args` are the command-line flags. Returns the exit code."""
    parse = partial(tyro.cli, Flags, args=args, prog="python -m experiments.language_model generate")
    return command.run_command("language_model", parse, run)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Print the prompts with their continuations."""
    del out
    if flags.max_length is not None and flags.max_length < 1:
        raise FlagError(
            f"--max-length {flags.max_length}: must be at least 1; leave it out for that of training"
        )
    model, tokenizer = load_run(flags.run, best=flags.best, max_length=flags.max_length)
    try:
        prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in flags.prompt]
    except UnicodeEncodeError as error:
        raise FlagError(f"--prompt: is not UTF-8 ({error}); convert it, for instance with iconv") from error
    stop = [tokenizer.bos] if tokenizer.eos is None else [tokenizer.bos, tokenizer.eos]
    stream = Stream(tokenizer, flags.prompt[0], prompts[0]) if len(prompts) == 1 else None
    try:
        generator = Generator(model, Sampling(flags.temperature, flags.top_k, flags.top_p))
        began = time.perf_counter()
        options = {"seed": flags.seed, "stop": stop, "on_tokens": stream}
        answers = generator(prompts, flags.max_tokens, **options)
    except ValueError as error:
        raise FlagError(with_flags(str(error), ARGUMENTS)) from error
    seconds = time.perf_counter() - began
    if stream is None:
        for text, ids, answer in zip(flags.prompt, prompts, answers, strict=True):
            whole = text + continuation(tokenizer, ids, answer)
            console.print(whole, markup=False, soft_wrap=True)
            console.rule()
    count = sum(map(len, answers))
    console.print(
        f"\n{count} tokens in {seconds:.1f} s, compilation included: {count / seconds:.1f} tokens/s"
    )
    return 0


def continuation(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """Return what an answer adds to its prompt; alone, SentencePiece's lose the space that they begin with."""
    return tokenizer.decode([*prompt, *answer]).removeprefix(tokenizer.decode(prompt))


class Stream:
    """Writes an answer as far as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, text: str, prompt: list[int]) -> None:
        self.tokenizer, self.text, self.prompt, self.ids, self.shown = tokenizer, text, prompt, [], ""

    def __call__(self, tokens: list[int | None]) -> None:
        """Take the next token of the only prompt, which is written with the first."""
        if not self.ids:
            self.write(self.text)
        if tokens[0] is None:
            return
        self.ids.append(tokens[0])
        text = continuation(self.tokenizer, self.prompt, self.ids)
        if not text.endswith("\ufffd"):
            self.write(text.removeprefix(self.shown))
            self.shown = text

    def write(self, text: str) -> None:
        """Write to the terminal at once."""
        sys.stdout.write(text)
        sys.stdout.flush()
