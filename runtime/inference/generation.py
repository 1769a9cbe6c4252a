"""Text from a trained model: one pass over the prompt, then token by token with a KV cache.

Two programs do all of it, whatever the prompt: `prefill` runs CHUNK tokens at once, `decode` one.
Both write keys and values into the same bound buffers, in place.

What does not fit is never dropped silently. The model sees at most `context` tokens; a prompt
longer than that is refused, and a text that has filled the context ends there. (Sliding the window
instead would give every kept token a new position, hence all keys anew: a pass over the whole
context for each further token, and a text that has forgotten its beginning.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import numpy as np

from backends.backend import Buffer, Program
from euler_ir.errors import EulerError
from model.transformer import forward_cached
from runtime.compiler.driver import compile_function
from runtime.compiler.dump import Dump
from runtime.engine import Model
from runtime.inference.sampler import Sampler

#: Tokens of a prefill: enough for its matmuls to be efficient, few enough to waste little on a
#: short prompt, whose rest is padding.
CHUNK = 64

#: Keys and values of fewer tokens are not worth a program of their own.
SMALLEST_CAPACITY = 1024

# Why a text ended.
END_OF_TEXT = "the text's end"
MAX_TOKENS = "the number of tokens asked for"
CONTEXT_FULL = "the context is full"


class Generator:
    """A text in progress: `tokens`, and the model's keys and values for them.

    `context` is the most tokens the model may see, by default what its position tables hold.
    `stop_reason` says why the last `stream` ended, one of the module's three reasons."""

    def __init__(self, model: Model, context: int | None = None, chunk: int = CHUNK,
                 dump: Dump | None = None) -> None:
        self.context = model.checked_context(context)
        self.model, self._dump = model, dump
        self._chunk = min(chunk, self.context)
        self._caches = cache_buffers(model, 1, self.context)
        self._decode = self._compile(1)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.tokens: list[int] = []
        self.stop_reason: str | None = None
        self._cached = 0  # tokens whose keys and values are in the cache

    def stream(self, prompt: Sequence[int], max_tokens: int, sampler: Sampler,
               stop: Collection[int] = ()) -> Iterator[int]:
        """Append the prompt to the text, then up to `max_tokens` tokens as the sampler takes them;
        yields those. An id in `stop` ends the text; it is yielded no more than it is kept.

        The prompt is checked, and run, before this returns. Raises EulerError for an id outside
        the vocabulary, for a text longer than the context, and for one that would be empty."""
        logits = self.extend(prompt)
        return self._continue(logits, max_tokens, sampler, stop)

    def _continue(self, logits: np.ndarray, max_tokens: int, sampler: Sampler,
                  stop: Collection[int]) -> Iterator[int]:
        for count in range(max_tokens):
            if count:
                if len(self.tokens) > self.context:
                    self.stop_reason = CONTEXT_FULL
                    return
                logits = self.extend(())
            token = sampler.sample(logits)
            if token in stop:
                self.stop_reason = END_OF_TEXT
                return
            self.tokens.append(token)
            yield token
        self.stop_reason = MAX_TOKENS

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens to the text; the logits [V] of the one that would come next.

        Raises EulerError, and leaves the text as it was, for what cannot be appended."""
        total = len(self.tokens) + len(tokens)
        if total == 0:
            raise EulerError("the prompt is empty: there is nothing to go on from")
        if total > self.context:
            raise EulerError(f"the text has {total} tokens, the model's context is {self.context}: "
                             "shorten the prompt")
        self.model.check_tokens(tokens)
        self.tokens += map(int, tokens)
        # The last token runs again where all are known: its logits are not kept.
        start = min(self._cached, total - 1)
        while start < total:
            logits, start = self._run(start)
            self._cached = start
        return logits

    def _run(self, start: int) -> tuple[np.ndarray, int]:
        """Run a decode or prefill from token `start` on: logits after it, and where it ended."""
        left = len(self.tokens) - start
        if left == 1:
            program, size = self._decode, 1
        else:
            program, size = self._prefill, self._chunk
            # Near the end of the cache a whole chunk fits only further back: it computes some
            # known keys and values again, which is better than to run over the end.
            start = min(start, self.context - size)
        count = min(len(self.tokens) - start, size)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = self.tokens[start:start + count]
        outputs = program.run({"tokens": tokens, "position": np.array(start, np.int32),
                               "last": np.array(count - 1, np.int32)})
        return outputs["logits"][0], start + count

    @cached_property
    def _prefill(self) -> Program:
        """Compiled when first needed, which a text that begins with one token never does."""
        return self._compile(self._chunk)

    def _compile(self, time: int) -> Program:
        model = self.model
        function = forward_cached(model.config, 1, time, self.context, model.dtype)
        return compile_function(function, model.backend, {**model.bound, **self._caches},
                                self._dump)


def cache_capacity(tokens: int, context: int) -> int:
    """Room for the keys and values of so many tokens, a power of two if that is less than the
    context: few programs to compile for all prompts, and little memory for a short text of a model
    with a long context."""
    return min(max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length()), context)


def cache_buffers(model: Model, batch: int, capacity: int) -> dict[str, Buffer]:
    """Memory for the keys and values of `capacity` tokens in `batch` texts, an input of
    `forward_cached` each: zeros [batch, capacity, KV heads, head size]."""
    config = model.config
    shape = (batch, capacity, config.kv_heads, config.head_size)
    return {f"cache.{i}.{part}": model.allocate(shape)
            for i in range(config.layers) for part in ("keys", "values")}
