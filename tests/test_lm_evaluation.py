"""Generation and scoring: equal to the whole forward pass, whatever the batch, the chunks and the padding."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eflax.evaluation.perplexity import Scorer, perplexity
from eflax.models import LanguageModel, named_config
from eflax.models.language_model_generate import Generator, Sampling, choose

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 7, 6, 5]]


@pytest.fixture(scope="module")
def model():
    config = named_config("efla-tiny", num_layers=2, width=32)
    model = LanguageModel(config, form="recurrent", rngs=nnx.Rngs(0))
    model.embedding[...] = 20 * model.embedding[...]  # so that some tokens are far more likely than others
    return model


@pytest.fixture(scope="module")
def log_probabilities(model):
    """Of all next tokens of a sequence of at most 150, by one whole forward pass."""
    forward = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)[0]))

    def of(sequence):
        tokens = jnp.zeros((1, 150), jnp.int32).at[0, : len(sequence)].set(jnp.asarray(sequence))
        return np.asarray(forward(model, tokens))[0, : len(sequence)]

    return of


def test_greedy_decoding_is_the_argmax_of_the_whole_forward_pass(model, log_probabilities):
    seen = []
    answers = Generator(model, chunk_size=3)(PROMPTS, 6, on_tokens=seen.append)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        likely = log_probabilities([*prompt, *answer]).argmax(-1)
        assert answer == likely[len(prompt) - 1 : -1].tolist()
    assert [list(tokens) for tokens in zip(*seen, strict=True)] == answers
    stopped = Generator(model, chunk_size=3)(PROMPTS, 6, stop=[answers[0][-1]])
    assert stopped[0] == answers[0][: answers[0].index(answers[0][-1])]


def test_sampling_keeps_to_what_it_may_choose():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    key = jax.random.key(0)

    def drawn(**options):
        sampling = Sampling(temperature=1.0, **options)
        draw = jax.jit(jax.vmap(lambda key: choose(logits, key, sampling)[0]))
        return np.bincount(np.asarray(draw(jax.random.split(key, 4000))), minlength=4) / 4000

    np.testing.assert_allclose(drawn(), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    np.testing.assert_allclose(drawn(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(drawn(top_p=0.7), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    for name, value in (("temperature", 1e-45), ("top_k", -1), ("top_p", 1e-46)):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(Sampling(), **{name: value})


def test_batched_padded_scores_are_those_of_single_sequences(model, log_probabilities):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 258, size).tolist() for size in (5, 150, 1, 64, 90)]
    firsts = [2, 1, 1, 60, 1]
    scorer, told = Scorer(model, batch_size=2, length=64), []
    scores = scorer(sequences, firsts, told.append)  # windows of 64, with carried state
    assert told == [150 + 90, 64 + 5, 1]
    for sequence, first, score in zip(sequences, firsts, scores, strict=True):
        table = log_probabilities(sequence)
        single = -sum(table[at - 1, sequence[at]] for at in range(first, len(sequence)))
        assert score.tokens == len(sequence) - first
        assert abs(score.nll - single) <= 1e-3 * max(score.tokens, 1)
    likely = log_probabilities(sequences[0]).argmax(-1)
    greedy = [*sequences[0], int(likely[-1])]
    assert Scorer(model, batch_size=2, length=64)([greedy, sequences[0]], [5, 4])[0].greedy


def test_perplexity_counts_tokens_words_and_bytes():
    from eflax.evaluation.perplexity import Score

    found = perplexity([Score(6.0, 3, False), Score(2.0, 1, False)], ["a b", "über"])
    np.testing.assert_allclose(found, [np.exp(8 / 4), np.exp(8 / 3), 8 / 8 / np.log(2)])
    assert perplexity([Score(800.0, 800, False)], ["x" * 800])[:2] == (np.e, np.inf)  # all one word


def test_what_cannot_be_generated_or_scored_is_told(model):
    with pytest.raises(ValueError, match="each needs at least one id"):
        Generator(model)([[]], 3)
    with pytest.raises(ValueError, match="vocab_size=258"):
        Generator(model)([[300]], 3)
    with pytest.raises(ValueError, match="max_tokens"):
        Generator(model)([[3]], 0)
    with pytest.raises(ValueError, match="seed=-1 must lie in 0"):
        Generator(model)([[3]], 1, seed=-1)
    with pytest.raises(ValueError, match="length=96 must be a multiple of 64, or below it"):
        Scorer(model, length=96)
    attention = LanguageModel(named_config("transformer-tiny", num_layers=1), max_length=64, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"need 68 tokens.*max_length=64"):
        Generator(attention)([[1] * 8], 60)
    assert Scorer(attention).length == 64 and Scorer(model).length == 2048
    with pytest.raises(ValueError, match="length=128: the states of softmax attention hold max_length=64"):
        Scorer(attention, length=128)
    with pytest.raises(ValueError, match="firsts: 3 is no index"):
        Scorer(model)([[1, 2]], [3])


def test_tasks_of_the_harness_score_local_rows(model, log_probabilities, tmp_path, monkeypatch):
    """Rows in the hub's columns, through the harness's own descriptions of its tasks, without network."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    from eflax.data.tokenizers import load_tokenizer
    from eflax.evaluation.lm_eval_adapter import HarnessModel, write_local_tasks

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lambada = [{"text": text} for text in ("a stone by the sea", "we saw it fall", "the rain in spain")]
    piqa = [
        {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Turn the glass.", "label": 0},
        {"goal": "Dry a cup", "sol1": "Fill it with tea.", "sol2": "Use a towel.", "label": 1},
    ]
    for name, rows in (("lambada_openai", lambada), ("piqa", piqa)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = write_local_tasks(tmp_path / "tasks", tmp_path)
    assert names == ["lambada_openai", "piqa"]
    tokenizer = load_tokenizer("bytes")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    harness = HarnessModel(model, tokenizer, batch_size=2, length=64)
    with jax.numpy_rank_promotion("allow"):
        tasks: Any = names
        found: Any = evaluator.simple_evaluate(harness, tasks=tasks, task_manager=manager, bootstrap_iters=0)

    def likelihood(context, answer):
        before, after = tokenizer.encode(context), tokenizer.encode(answer)
        table = log_probabilities([tokenizer.bos, *before, *after])[len(before) : -1]
        return sum(table[np.arange(len(after)), after]), table.argmax(-1).tolist() == after

    answers = [
        likelihood(*(text[: (at := text.rindex(" "))], text[at:])) for text in (r["text"] for r in lambada)
    ]
    samples = found["samples"]["lambada_openai"]
    scored = {sample["doc"]["text"]: sample["filtered_resps"][0] for sample in samples}
    for row, (log_likelihood, greedy) in zip(lambada, answers, strict=True):
        np.testing.assert_allclose(scored[row["text"]][0], log_likelihood, rtol=1e-4)
        assert scored[row["text"]][1] == greedy
    chosen = []
    for row in piqa:
        context = f"Question: {row['goal']}\nAnswer:"
        choices = [likelihood(context, f" {row[name]}")[0] for name in ("sol1", "sol2")]
        chosen.append(np.argmax(choices) == row["label"])
    assert found["results"]["piqa"]["acc,none"] == np.mean(chosen)
