"""A checkpoint loaded for use: the model in a backend's memory, its tokenizer, and where its texts
begin and end. What generation and evaluation begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.backend import Backend
from euler_ir.errors import EulerError
from model.tokenizer import Tokenizer
from runtime.engine import Model
from runtime.exchange.boundaries import Boundaries, boundaries
from runtime.exchange.import_record import import_record
from runtime.settings import precision
from runtime.storage.checkpoint import load_model


@dataclass(frozen=True)
class Trained:
    """A model with its tokenizer. `context` is the length of the rows it was trained on,
    `boundaries` where its texts begin and end, `notes` what there is to say about the checkpoint
    it came from."""

    model: Model
    tokenizer: Tokenizer
    context: int
    boundaries: Boundaries
    notes: Sequence[str] = ()

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt after those that the tokenizer puts before every text; where there
        are none at all, the id that texts begin with.

        Raises EulerError for an empty prompt where there is no such id."""
        ids = self.tokenizer.encode_prompt(prompt)
        if ids:
            return ids
        if self.boundaries.begin is None:
            raise EulerError("the prompt is empty, and this model has no token that texts begin "
                             "with: give some text")
        return [self.boundaries.begin]


def load_trained(path: Path | str, backend: Backend) -> Trained:
    """The model and tokenizer of a checkpoint, or of a run directory's newest whole one; the
    weights in the backend's memory.

    Raises EulerError when there is none, or it is not whole."""
    checkpoint, config = load_model(path)
    settings = checkpoint.settings()
    with checkpoint.error_context():
        dtype = precision(settings["precision"])
    model = Model(config, backend, dtype)
    model.load(checkpoint.tensors)
    tokenizer = checkpoint.tokenizer(config)
    return Trained(model, tokenizer, settings["context"],
                   boundaries(tokenizer.vocabulary, import_record(checkpoint, config)),
                   checkpoint.notes)
