"""What a task of lm-evaluation-harness asks of a text to be generated, checked.

Tasks give a dictionary, in the names of several libraries. Names that we lack are refused: a text
that was made otherwise than asked for would be measured as if it were not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from euler_ir.errors import EulerError, shown
from runtime.inference.sampler import Sampler

#: Names of the most tokens to generate; the first that is given counts.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", *_MAX_TOKENS, "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class GenerationRequest:
    """The text ends before the first of the strings in `until`, or after `max_tokens`.
    `temperature` 0 is greedy decoding; the others are as `Sampler`'s."""

    until: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float

    def sampler(self, ids: Sequence[int], draws: int) -> Sampler:
        """A sampler that goes on after so many random numbers."""
        return Sampler(self.temperature, self.top_k, self.top_p, ids=ids, draws=draws)


def generation_request(arguments: Mapping[str, Any], max_tokens: int) -> GenerationRequest:
    """The task's arguments, with `max_tokens` where it does not say how many.

    `do_sample` false, or no temperature and no `do_sample`, is greedy decoding; true without a
    temperature is the model's own odds. Raises EulerError for names that we lack and for values
    that cannot be."""
    unknown = sorted(set(arguments) - set(_KNOWN))
    if unknown:
        raise EulerError(f"generation_kwargs has {', '.join(map(shown, unknown))}, which is not "
                         f"supported; there are {', '.join(_KNOWN)}")
    until = arguments.get("until") or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list | tuple) or not all(isinstance(stop, str) for stop in until):
        raise EulerError(f"until must be a string or a list of strings, got {shown(until)}")
    given = next((name for name in _MAX_TOKENS if arguments.get(name) is not None), None)
    if given is not None:
        max_tokens = _number(arguments, given, int, max_tokens)
        if max_tokens < 1:
            raise EulerError(f"{given} must be at least 1, got {max_tokens}")
    sampled = arguments.get("do_sample")
    if sampled not in (None, True, False):
        raise EulerError(f"do_sample must be true or false, got {shown(sampled)}")
    temperature = _number(arguments, "temperature", float, 1.0 if sampled else 0.0)
    return GenerationRequest(tuple(stop for stop in until if stop), max_tokens,
                             0.0 if sampled is False else temperature,
                             _number(arguments, "top_k", int, 0),
                             _number(arguments, "top_p", float, 1.0))


def _number(arguments: Mapping[str, Any], name: str, kind: type, default: float) -> Any:
    """An argument as a number of this kind. Tasks' files also write numbers as text."""
    value = arguments.get(name)
    if value is None:
        return default
    try:
        number = kind(value)
        if isinstance(value, bool) or (kind is int and number != float(value)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise EulerError(f"{name} must be {what}, got {shown(value)}") from None
    return number
