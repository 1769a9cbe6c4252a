"""A trained model as lm-evaluation-harness asks for it (Gao et al., doi:10.5281/zenodo.12608602).

`EulerLM` is registered there as "euler" once this module is imported, which needs the package:
`simple_evaluate("euler", model_args={"checkpoint": "runs/..."}, tasks=...)`. Encoding, cuts and
windows are those of the harness's own model for `transformers`, so that figures can be compared:

* A context longer than the model's loses its beginning. A continuation never does: one that is
  longer than the context is refused.
* An empty context is the token that texts begin with. A text to be scored whole is cut into windows
  in which each token is scored once.
* Special tokens written out in a task's text are these tokens.
"""

from __future__ import annotations

import difflib
import json
import math
import traceback
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  (a registry with a model in it does not look for its own)
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
)
from tqdm import tqdm

from backends.backend import create
from euler_ir.errors import EulerError
from runtime.evaluation.generation_request import GenerationRequest, generation_request
from runtime.evaluation.scoring import ROWS, Scorer, ScoreRequest
from runtime.evaluation.stop_strings import text_until
from runtime.inference.generation import Generator, cache_capacity
from runtime.inference.trained import Trained, load_trained

#: Tokens to generate where a task does not say how many, if the context has room for twice that.
MAX_GENERATED = 256


@register_model("euler")
class EulerLM(TemplateLM):
    """A checkpoint, or a model that is loaded already, on a backend.

    Scores `batch_size` rows at a time; generates one text at a time."""

    def __init__(self, checkpoint: str | Path | Trained, batch_size: int = ROWS,
                 backend: str = "auto", threads: int | None = None) -> None:
        super().__init__()
        if type(batch_size) is not int or batch_size < 1:
            raise EulerError(f"the batch size must be a positive whole number, got {batch_size!r}")
        if not isinstance(checkpoint, Trained):
            checkpoint = load_trained(checkpoint, create(backend, threads=threads))
        self.trained, self.batch_size = checkpoint, batch_size
        self._generators: dict[int, Generator] = {}
        self._draws = 0  # random numbers used by all texts so far

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.trained.model, self.trained.context, self.batch_size)

    def _generator(self, tokens: int) -> Generator:
        """One with room for a text of so many tokens, compiled when first needed."""
        capacity = cache_capacity(tokens, self.max_length)
        if capacity not in self._generators:
            self._generators[capacity] = Generator(self.trained.model, capacity)
        return self._generators[capacity]

    @property
    def max_length(self) -> int:
        """The most tokens that the model sees."""
        return self.trained.context

    @property
    def max_gen_toks(self) -> int:
        return max(min(MAX_GENERATED, self.max_length // 2), 1)

    @property
    def eot_token_id(self) -> int | None:
        return next(iter(self.trained.boundaries.ends), None)

    @property
    def prefix_token_id(self) -> int:
        begin = self.trained.boundaries.begin
        if begin is None:
            raise EulerError("a text is to be scored from its first token on, and this model has "
                             "no token that texts begin with")
        return begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None,
                   **kwargs: Any) -> list[int]:
        """The ids of a text, after those that the tokenizer puts before every text. These are left
        out where the text begins with them already, and for `add_special_tokens=False`."""
        tokenizer = self.trained.tokenizer
        ids = tokenizer.encode(string, allowed_special=tokenizer.special_tokens)
        prefix = list(tokenizer.vocabulary.prefix)
        if add_special_tokens is False or ids[:len(prefix)] == prefix:
            return ids
        return prefix + ids

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]],
                              disable_tqdm: bool = False, **kwargs: Any
                              ) -> list[tuple[float, bool]]:
        """The log-probability of each request's continuation and whether greedy decoding would give
        it; requests are (texts, context ids, continuation ids)."""
        asked = [self._score_request(context, continuation)
                 for _, context, continuation in requests]
        results: list[Any] = [None] * len(asked)
        progress = tqdm(self._scorer.scores(asked), total=len(asked), desc="log-likelihood",
                        disable=disable_tqdm)
        for number, score in progress:
            results[number] = score.total, bool(score.greedy.all())
            if (texts := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[number])
        return results

    def _score_request(self, context: Sequence[int], continuation: Sequence[int]) -> ScoreRequest:
        count = len(continuation)
        if not 1 <= count <= self.max_length:
            raise EulerError(f"a continuation has {count} tokens; it must have 1 to "
                             f"{self.max_length}, which is the model's context")
        return ScoreRequest([*context, *continuation][-(self.max_length + 1):], count)

    def loglikelihood_rolling(self, requests: list[Instance],
                              disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self._loglikelihood_tokens(
            [(None, *window) for of_text in windows for window in of_text], disable_tqdm))
        results = []
        for request, of_text in zip(requests, windows, strict=True):
            results.append(math.fsum(next(scores)[0] for _ in of_text))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Context and continuation of each window; together the continuations are the text."""
        windows: Iterable = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model goes on with after each context, up to the first stop string."""
        asked = [self._asked(request.args[1]) for request in requests]
        results = []
        for request, wanted in zip(tqdm(requests, desc="generation", disable=disable_tqdm), asked,
                                   strict=True):
            results.append(self._generate(request.args[0], wanted))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def _asked(self, arguments: dict[str, Any]) -> GenerationRequest:
        asked = generation_request(arguments, self.max_gen_toks)
        if asked.max_tokens >= self.max_length:
            raise EulerError("the tokens to generate (max_gen_toks) must be fewer than the model's "
                             f"context of {self.max_length}, got {asked.max_tokens}")
        return asked

    def _generate(self, context: str, asked: GenerationRequest) -> str:
        trained, special = self.trained, self.trained.tokenizer.special_tokens
        room = self.max_length - asked.max_tokens
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        ends = {*trained.boundaries.ends,
                *(special[stop] for stop in asked.until if stop in special)}
        sampler = asked.sampler(trained.tokenizer.vocabulary.ids, self._draws)
        generator = self._generator(len(prompt) + asked.max_tokens)
        generator.reset()
        tokens = generator.stream(prompt, asked.max_tokens, sampler, ends)
        text = text_until(trained.tokenizer, tokens, asked.until, silent=set(special.values()))
        self._draws = sampler.draws
        return text


def run_tasks(model: EulerLM, names: Sequence[str], include_path: Path | str | None = None,
              limit: int | None = None, num_fewshot: int | None = None,
              bootstrap_iters: int = 100_000) -> dict[str, Any]:
    """The harness's results for tasks, groups and tags by name or pattern.

    `include_path` is a folder of further tasks; `limit` takes the first so many documents of each
    task. Raises EulerError for names that nothing has, for tasks whose files or data are not to be
    had, and for what the harness cannot do with one."""
    tasks = _tasks(names, include_path)
    try:
        # No seed for torch, of which the harness would otherwise import all.
        return simple_evaluate(model, tasks=tasks.match_tasks(list(names)), task_manager=tasks,
                               limit=limit, num_fewshot=num_fewshot, batch_size=model.batch_size,
                               bootstrap_iters=bootstrap_iters, log_samples=False,
                               torch_random_seed=None)
    except (EulerError, OSError, MemoryError):
        raise
    except Exception as error:  # tasks are others' files and code; a bug of ours stays one
        if _came_through_us(error):
            raise
        raise EulerError(f"the tasks {', '.join(names)} cannot be run: {_told(error)}") from error


def _came_through_us(error: Exception) -> bool:
    """Whether the harness called our code, which then failed."""
    frames = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames.count(__name__) > 1  # the first is what called the harness


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def tables(results: dict[str, Any]) -> str:
    """The results for people: a table of the tasks, and of their groups if there are any."""
    columns = ["results", *(["groups"] if results.get("groups") else [])]
    return "\n".join(make_table(results, column) for column in columns)


def as_json(results: dict[str, Any]) -> str:
    """All of the results, the tasks' configurations and the versions included."""
    return json.dumps(results, indent=2, ensure_ascii=False, default=handle_non_serializable)


class _Tasks(TaskManager):
    """Tasks by name, of which a failure to load one is told in one line."""

    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # tasks are others' files and code: anything can be wrong
            raise EulerError(f"the tasks {', '.join(map(str, task_list))} cannot be loaded: "
                             f"{_told(error)}") from error


def _tasks(names: Sequence[str], include_path: Path | str | None) -> _Tasks:
    """Tasks among which all names are. The harness's own ones, which are more than ten thousand
    files to read, are left out where the folder has what is asked for."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise EulerError(f"--include-path {include_path} is no directory")
        folder = _Tasks(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(folder.all_subtasks):
            return folder
    tasks = _Tasks(include_path=include_path and str(include_path))
    for name in names:
        if not tasks.match_tasks([name]):
            near = difflib.get_close_matches(name, tasks.all_tasks, 3)
            raise EulerError(f"lm-eval has no task {name!r}"
                             + (f"; names like it: {', '.join(near)}" if near else "")
                             + (f" (looked in {include_path} too)" if include_path else ""))
    return tasks
