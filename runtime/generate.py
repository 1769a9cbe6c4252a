"""Let a trained model go on from a prompt.

    python -m runtime.generate --checkpoint runs/2025-01-31-nano-1m --prompt "ROMEO:"

The prompt and what follows go to stdout as they come, a line about speed to stderr. The same
arguments give the same text again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from model.tokenizer import StreamDecoder
from runtime.arguments import add_backend, add_checkpoint, add_seed, backend_of
from runtime.cli import Parser, integer, print_notes, run_command
from runtime.inference.generation import Generator, cache_capacity
from runtime.inference.sampler import Sampler
from runtime.inference.trained import load_trained


def parser() -> Parser:
    p = Parser(prog="python -m runtime.generate", description=__doc__.splitlines()[0])
    add_checkpoint(p)
    p.add_argument("--prompt", default="", metavar="TEXT",
                   help="what the text begins with (nothing: a text from its beginning)")
    p.add_argument("--max-tokens", type=integer(1), default=200, metavar="N",
                   help="the most tokens to add (200)")
    p.add_argument("--temperature", type=float, default=0.8, metavar="X",
                   help="0: always the likeliest token; 1: the model's own odds (0.8)")
    p.add_argument("--top-k", type=int, default=50, metavar="N",
                   help="choose among the N likeliest tokens only; 0: all (50)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="X",
                   help="choose among the fewest tokens that have this share of the odds (1)")
    add_seed(p, "the choices")
    add_backend(p)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    settings = (arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    Sampler(*settings)  # refuses bad settings before anything is read
    backend = backend_of(arguments)
    trained = load_trained(arguments.checkpoint, backend)
    print_notes(trained.notes)
    tokenizer = trained.tokenizer
    sampler = Sampler(*settings, ids=tokenizer.vocabulary.ids)
    prompt = trained.encode(arguments.prompt)
    if arguments.prompt:
        print(tokenizer.decode(tokenizer.encode(arguments.prompt)), end="", flush=True)

    capacity = cache_capacity(len(prompt) + arguments.max_tokens, trained.context)
    generator = Generator(trained.model, capacity)
    stream = generator.stream(prompt, arguments.max_tokens, sampler, trained.boundaries.ends)
    decoder, moments = StreamDecoder(tokenizer), []
    for token in stream:
        print(decoder.push(token), end="", flush=True)
        moments.append(time.perf_counter())
    print(decoder.finish(), flush=True)
    print(f"{len(moments)} tokens{_speed(moments)}, ended by: {generator.stop_reason}",
          file=sys.stderr)


def _speed(moments: Sequence[float]) -> str:
    """Tokens a second from the first token on: what comes before is start-up and the prompt."""
    if len(moments) < 2:
        return ""
    return f", {(len(moments) - 1) / (moments[-1] - moments[0]):,.1f} tokens/s"


if __name__ == "__main__":
    sys.exit(run_command(main))
