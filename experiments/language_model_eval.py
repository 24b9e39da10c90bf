"""Perplexity of a trained language model over documents, by token, word and byte."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from eflax.data import DataError
from eflax.data.download import write_atomically
from eflax.data.text_sources import read_documents
from eflax.data.tokenizers import Tokenizer
from eflax.evaluation.perplexity import Scorer, perplexity
from eflax.models import LanguageModel
from eflax.progress import Progress
from experiments import command
from experiments.command import FlagError, with_flags
from experiments.language_model_load import load_run


@dataclass(frozen=True)
class Flags:
    """Measure a trained model: perplexity over documents, each read from start to end, and tasks of lm-eval."""

    # The folder of a training run.
    run: Positional[Path]

    # Documents whose perplexity is measured, as for train --data, but not ids.
    data: Annotated[tuple[str, ...], arg(metavar="SOURCE ...")] = ()

    # Tasks of lm-evaluation-harness, such as piqa; the paper's suite is wikitext lambada_openai piqa hellaswag
    # winogrande arc_easy arc_challenge boolq openbookqa sciq. Needs the extra eval.
    tasks: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()

    # A folder with the rows of the tasks, in files such as piqa.jsonl; by default they come from the hub.
    rows: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None

    # The field of the text, where documents have fields.
    field: str = "text"

    # So many documents of each source, or rows of each task, at most.
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None

    # Take the parameters of the lowest validation loss, not the last ones.
    best: bool = False

    # Documents at once.
    batch_size: int = 16

    # Tokens of a document at once, below 64 or a multiple of it; by default 2048, or what softmax attention holds.
    length: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None

    # A new file for the results and what they are of, as JSON.
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None

    @property
    def resume(self) -> Path | None:
        """Nothing is resumed."""
        return None


def main(args: Sequence[str]) -> int:
    """Evaluate; `args` are the command-line flags. Returns the exit code."""
    parse = partial(tyro.cli, Flags, args=args, prog="python -m experiments.language_model eval")
    return command.run_command("language_model", parse, run)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Print a table, and write it where that is asked for."""
    del out
    if flags.out is not None and flags.out.exists():
        raise FlagError(f"--out {flags.out}: there is such a file; remove it, or give a new one")
    if flags.out is not None and not os.access(flags.out.parent, os.W_OK):
        raise FlagError(f"--out {flags.out}: cannot write into {flags.out.parent}; give another, or make it")
    if flags.limit is not None and flags.limit < 1:
        raise FlagError(f"--limit {flags.limit}: must be at least 1; leave it out to take all")
    if not flags.data and not flags.tasks:
        raise FlagError("give --data, --tasks or both: there is nothing to evaluate on")
    model, tokenizer = load_run(flags.run, best=flags.best)
    try:
        scorer = Scorer(model, flags.batch_size, flags.length)
    except ValueError as error:
        raise FlagError(with_flags(str(error), ("batch_size", "length"))) from error
    results = {}
    if flags.data:
        results |= evaluate_texts(flags, scorer, tokenizer, console)
    if flags.tasks:
        results |= evaluate_tasks(flags, model, tokenizer, console)
    if flags.out is not None:
        what = {"run": str(flags.run), "best": flags.best, "limit": flags.limit, "results": results}
        write_atomically(flags.out, (json.dumps(as_json(what), indent=2, allow_nan=False) + "\n").encode())
    return 0


def as_json(x: Any) -> Any:
    """Return the same with text, such as "inf", for numbers that JSON does not have."""
    if isinstance(x, dict):
        return {name: as_json(value) for name, value in x.items()}
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def evaluate_texts(flags: Flags, scorer: Scorer, tokenizer: Tokenizer, console: Console) -> dict[str, Any]:
    """Print and return the perplexity of each source."""
    table = Table("data", "documents", "tokens", "perplexity", "by word", "bits per byte")
    results = {}
    for source in flags.data:
        try:
            texts = list(islice(read_documents(source, flags.field), flags.limit))
        except DataError as error:
            raise FlagError(f"--data: {error}") from error
        if not texts:
            raise FlagError(f"--data {source}: has no text; remove it or get it again")
        ids = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts]
        with Progress(f"score {source}", sum(map(len, ids)), unit="token") as progress:
            scores = scorer(ids, advance=progress.advance)
        found, tokens = perplexity(scores, texts), sum(score.tokens for score in scores)
        sizes = {"documents": len(texts), "tokens": tokens}
        names = ("perplexity", "word_perplexity", "bits_per_byte")
        results[source] = sizes | dict(zip(names, found, strict=True))
        values = (f"{found.token:.3f}", f"{found.word:.3f}", f"{found.bits_per_byte:.4f}")
        table.add_row(source, str(len(texts)), str(tokens), *values)
    console.print(table)
    return results


def evaluate_tasks(
    flags: Flags, model: LanguageModel, tokenizer: Tokenizer, console: Console
) -> dict[str, Any]:
    """Print and return what lm-evaluation-harness finds for each task."""
    try:
        import lm_eval.tasks
        from lm_eval import evaluator
        from lm_eval.loggers.utils import add_env_info

        from eflax.evaluation.lm_eval_adapter import HarnessModel, write_local_tasks

        add_env_info({})  # it comes after all is scored, which a broken transformers would throw away
    except ImportError as error:
        raise FlagError(
            f"--tasks needs lm-evaluation-harness: pip install 'eflax[eval]' ({error})"
        ) from error
    with TemporaryDirectory() as folder:
        manager = lm_eval.tasks.TaskManager()
        if flags.rows is not None:
            local = write_local_tasks(Path(folder), flags.rows)
            if missing := [task for task in flags.tasks if task not in local]:
                raise FlagError(f"--rows {flags.rows}: no rows of {missing[0]}; there are {', '.join(local)}")
            manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
        adapter = HarnessModel(model, tokenizer, flags.batch_size, flags.length)
        options: dict[str, Any] = {"task_manager": manager, "limit": flags.limit, "bootstrap_iters": 0}
        found: Any = evaluator.simple_evaluate(adapter, tasks=list(flags.tasks), **options)
    table = Table("task", "metric", "value")
    results = {}
    for task, values in found["results"].items():
        results[task] = {name: value for name, value in values.items() if isinstance(value, float)}
        for name, value in results[task].items():
            table.add_row(task, name.removesuffix(",none"), f"{value:.4f}")
    console.print(table)
    return results
