"""Language models in lm-evaluation-harness; needs the extra `eval`.

Import it where it is used: the harness takes seconds to import.
"""

from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
from lm_eval.api.model import TemplateLM

from eflax.data.tokenizers import Tokenizer
from eflax.evaluation.perplexity import Score, Scorer
from eflax.models.language_model import LanguageModel
from eflax.models.language_model_generate import Generator, Sampling
from eflax.progress import Progress

# The paper's Table 1, by the names of the harness.
SUITE = (
    "wikitext",
    "lambada_openai",
    "piqa",
    "hellaswag",
    "winogrande",
    "arc_easy",
    "arc_challenge",
    "boolq",
    "openbookqa",
    "sciq",
)
# Where the harness describes a task, the split that it is scored on.
LOCAL = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai", "test"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2_raw_test", "test"),
    "piqa": ("piqa/piqa.yaml", "piqa", "validation"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag", "validation"),
    "winogrande": ("winogrande/default.yaml", "winogrande", "validation"),
    "arc_easy": ("arc/arc_easy.yaml", "arc_easy", "test"),
    "arc_challenge": ("arc/arc_challenge.yaml", "arc_challenge", "test"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq", "validation"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "openbookqa", "test"),
    "sciq": ("sciq/sciq.yaml", "sciq", "test"),
}


class HarnessModel(TemplateLM):
    """A model of this project as the harness asks for it. Each text begins with the tokenizer's bos.

    Args:
        model: the model.
        tokenizer: of the model.
        batch_size: texts that are scored or continued at once.
        length: tokens of a window, see `Scorer`; with softmax attention, also the longest context of an answer.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, batch_size: int = 16, length: int | None = None
    ):
        super().__init__()
        self.model, self.tokenizer, self.size = model, tokenizer, batch_size
        self.scorer = Scorer(model, batch_size, length)

    @property
    def eot_token_id(self) -> int:
        """The id before a text without context."""
        return self.tokenizer.bos

    @property
    def prefix_token_id(self) -> int:
        """The id that every text begins with."""
        return self.tokenizer.bos

    @property
    def tokenizer_name(self) -> str:
        """What answers are cached under."""
        return self.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, without bos: scoring puts it before."""
        del add_special_tokens, kwargs
        return self.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        del kwargs
        bos = [self.tokenizer.bos]
        pairs = [
            (context if context[:1] == bos else bos + context, answer) for _, context, answer in requests
        ]
        texts = [context + answer for context, answer in pairs]
        scores = self._scores(texts, [len(context) for context, _ in pairs])
        return [(-score.nll, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, every token seeing all before it, see `Scorer`."""
        del disable_tqdm
        texts = [[self.tokenizer.bos, *self.tok_encode(request.args[0])] for request in requests]
        return [-score.nll for score in self._scores(texts)]

    def _scores(self, texts: list[list[int]], firsts: list[int] | None = None) -> list[Score]:
        with Progress(f"score {len(texts)} texts", sum(map(len, texts)), unit="token") as progress:
            return self.scorer(texts, firsts, progress.advance)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the greedy answer to each prompt, up to the first of its stop texts."""
        del disable_tqdm
        answers = []
        for start in range(0, len(requests), self.size):
            part = requests[start : start + self.size]
            prompts = [[self.tokenizer.bos, *self.tok_encode(request.args[0])] for request in part]
            most = max(request.args[1].get("max_gen_toks", 256) for request in part)
            stop = (
                [self.tokenizer.bos]
                if self.tokenizer.eos is None
                else [self.tokenizer.bos, self.tokenizer.eos]
            )
            found = Generator(self.model, Sampling())(prompts, most, stop=stop)
            for request, ids in zip(part, found, strict=True):
                options = request.args[1]
                text = self.tokenizer.decode(ids[: options.get("max_gen_toks", 256)])
                until = options.get("until", [])
                for end in [until] if isinstance(until, str) else until:
                    text = text.split(end)[0] if end else text
                answers.append(text)
        return answers


def write_local_tasks(folder: Path, rows: Path) -> list[str]:
    """Describe the tasks whose rows lie in a folder, as jsonl of the hub's columns, and return their names.

    Each description includes the harness's own and changes where the rows come from. Evaluate with
    ``lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)``.
    """
    base = Path(str(lm_eval.tasks.__file__)).parent
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, (description, stem, split) in LOCAL.items():
        file = (rows / f"{stem}.jsonl").resolve()
        if not file.is_file():
            continue
        other = "test" if split == "validation" else "validation"
        (folder / f"{name}.yaml").write_text(
            f"include: {base / description}\ntask: {name}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n    {split}: {file}\n"
            f"training_split: null\n{split}_split: {split}\n{other}_split: null\n"
        )
        names.append(name)
    return names
