"""The training run: data, model and loop, stopped and resumed at any step.

Step s is the state after s updates have been tried. A checkpoint holds everything that decides what
comes next; wall-clock time, thread count and the steps at which one evaluates or saves do not.

A run that begins with another one's weights saves them as its own step 0 before it trains: from
then on it does not need the checkpoint they came from, which may be gone or be another one by the
time that it is resumed.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from backends.backend import Backend
from euler_ir.errors import EulerError, error_context
from model.config import preset
from model.json_values import field, parse_object, whole_number
from model.parameters import parameter_count
from model.tokenizer import Tokenizer, train_tokenizer
from runtime.compiler.dump import Dump
from runtime.data.batches import BatchStream, ValidationSet
from runtime.data.streams import (
    DEFAULT_TEXT,
    TokenStream,
    byte_lengths,
    encode,
    find_files,
    load_stream,
    load_text,
)
from runtime.engine import Evaluator, Model, StepResult, Trainer
from runtime.exchange.import_record import import_record, record_after_training
from runtime.settings import Settings, precision
from runtime.storage.checkpoint import Checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from runtime.storage.files import decoded, read_error, write_atomic
from runtime.storage.metrics import MetricsWriter, plot_losses
from runtime.storage.run_directory import CONFIG

#: So many updates left out in a row mean that the run has diverged.
_SKIPPED_IN_A_ROW = 20


class Data:
    """A run's tokenizer and token streams."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer | None) -> None:
        paths = list(settings.data) or [DEFAULT_TEXT]
        if tokenizer is not None:
            self.tokenizer = tokenizer
        elif settings.tokenizer:
            self.tokenizer = Tokenizer.load(settings.tokenizer)
            settings.model(self.tokenizer.vocabulary_size)  # refused before a text is encoded
        else:
            stream = self._train_tokenizer(settings, paths)
            self.train, self.held_out = stream.split()
            return
        self.train, self.held_out = load_stream(paths, self.tokenizer).split()

    def _train_tokenizer(self, settings: Settings, paths: list) -> TokenStream:
        """A tokenizer of the preset's size from the texts, and the texts as its tokens."""
        if any(path.suffix == ".bin" for path in find_files(paths)):
            raise EulerError("token shards need the tokenizer they were made with: --tokenizer")
        texts = load_text(paths)
        size = preset(settings.preset).vocabulary
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            self.tokenizer = train_tokenizer([text.text for text in texts], size)
        for note in notes:
            print(note.message, file=sys.stderr)
        documents = [encode(text, self.tokenizer) for text in texts]
        return TokenStream(documents, self.tokenizer.vocabulary_size)


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a flag that the loop reads between steps; a second
    one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle)
                          for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    skipped_in_a_row: int = 0


class Run:
    """A training run: everything read and compiled, nothing written yet.

    It begins with initial weights, or goes on with a `checkpoint` of its own, or begins at step 0
    with the model and the tokenizer of a checkpoint of another one, `initial`, whose tensors have
    been checked (`load_model`)."""

    def __init__(self, settings: Settings, backend: Backend,
                 checkpoint: Checkpoint | None = None, dump: Dump | None = None,
                 initial: Checkpoint | None = None) -> None:
        settings.check_warmup()
        self.settings, self.backend = settings, backend
        origin = checkpoint or initial
        config = origin.model_config() if origin else None
        self.data = Data(settings, origin.tokenizer(config) if origin else None)
        self.config = config or settings.model(self.data.tokenizer.vocabulary_size)
        if settings.context > self.config.context:
            raise EulerError(f"rows of {settings.context} tokens are longer than the "
                             f"{self.config.context} that the model's positions cover")
        # Of an import, however long ago.
        record = import_record(origin, config) if origin else None
        self._import_record = (record_after_training(record, settings.precision.upper())
                               if record else None)
        self.batches = BatchStream(
            self.data.train, batch_size=settings.batch_size, context=settings.context,
            heads=self.config.prediction_heads, seed=settings.seed,
            accumulate=settings.accumulate)
        self.validation = ValidationSet(
            self.data.held_out, batch_size=settings.batch_size, context=settings.context,
            byte_lengths=byte_lengths(self.data.tokenizer))
        if settings.eval_every:
            self.validation.check()
        self.model = Model(self.config, backend, precision(settings.precision))
        self.trainer = Trainer(self.model, settings.optimizer, settings.batch_size,
                               settings.context, settings.accumulate, dump=dump,
                               recompute=settings.recompute)
        self.evaluator = Evaluator(self.model, settings.batch_size, settings.context, dump)
        self.progress = Progress()
        self._saves_its_beginning = initial is not None
        if checkpoint:
            self._restore(checkpoint)
        elif initial:
            self.model.load(initial.tensors)
        else:
            self.model.initialise(settings.seed)

    def _restore(self, checkpoint: Checkpoint) -> None:
        checkpoint.check_moments(self.trainer.moment_shapes)
        self.model.load(checkpoint.tensors)
        with checkpoint.error_context():
            self.batches.restore(field(checkpoint.state, "data", dict))
            skipped = whole_number(checkpoint.state, "skipped_in_a_row")
            self.trainer.load(checkpoint.moments, whole_number(checkpoint.state, "t"))
        self.progress = Progress(checkpoint.step, skipped)

    def train(self, directory: Path) -> bool:
        """Train to the last step, or until asked to stop; whether the last step was reached.
        Everything is written to the run directory."""
        settings, progress = self.settings, self.progress
        with (StopRequest() as stop, CheckpointWriter(directory, step=progress.step) as writer,
              MetricsWriter(directory, step=progress.step) as metrics,
              self._progress_bar() as bar):
            # Only now that the directory is this run's alone.
            if self._saves_its_beginning:
                self._save(writer)
            write_atomic(directory / CONFIG, self._config_json())
            gc.freeze()  # what is alive now stays; collections need not look at it again
            while progress.step < settings.steps and not stop.requested:
                self._step(metrics, bar)
                last = progress.step == settings.steps
                if settings.eval_every and (progress.step % settings.eval_every == 0 or last):
                    self._validate(metrics, bar)
                # While updates are left out the weights may be broken, and what is saved pushes
                # out the checkpoints from before.
                due = progress.step % settings.checkpoint_every == 0 and not last
                if due and not progress.skipped_in_a_row:
                    self._save(writer)
            self._save(writer, final=True)
        plot_losses(directory)
        return progress.step >= settings.steps

    def _step(self, metrics: MetricsWriter, bar: tqdm) -> None:
        progress, start = self.progress, time.perf_counter()
        rate = self.settings.learning_rate.at(progress.step)
        result = self.trainer.step(self.batches.batch(), rate)
        self.batches.advance()
        progress.step += 1
        speed = self.batches.tokens_per_step / (time.perf_counter() - start)
        metrics.write(progress.step, loss=result.loss, grad_norm=result.gradient_norm, lr=rate,
                      tokens_per_second=round(speed), applied=result.applied)
        self._watch(result)
        bar.set_postfix_str(f"loss {result.loss:.3f}, {speed:,.0f} tok/s", refresh=False)
        bar.update()

    def _watch(self, result: StepResult) -> None:
        """Say when an update was left out, and stop a run that does nothing else."""
        progress = self.progress
        progress.skipped_in_a_row = 0 if result.applied else progress.skipped_in_a_row + 1
        if result.applied:
            return
        tqdm.write(f"step {progress.step}: the gradient's norm is {result.gradient_norm}; "
                   "update left out", file=sys.stderr)
        if progress.skipped_in_a_row >= _SKIPPED_IN_A_ROW:
            raise EulerError(f"{_SKIPPED_IN_A_ROW} updates in a row had no finite gradient, the "
                             f"last at step {progress.step}: lower --lr, or resume an "
                             "earlier checkpoint")

    def _validate(self, metrics: MetricsWriter, bar: tqdm) -> None:
        values = self.validation.metrics(self.evaluator.loss(self.validation))
        metrics.write(self.progress.step, **values)
        bar.write(f"step {self.progress.step:>6}: validation loss {values['val_loss']:.4f} nats a "
                  f"token, {values['val_bits_per_byte']:.4f} bits a byte", file=sys.stderr)

    def _save(self, writer: CheckpointWriter, final: bool = False) -> None:
        state = {
            "step": self.progress.step,
            "skipped_in_a_row": self.progress.skipped_in_a_row,
            "t": int(self.trainer.t.read()),
            "data": self.batches.state(),
            "model": self.config.to_dict(),
            "settings": self.settings.to_dict(),
        }
        if self._import_record:
            state["source"] = self._import_record
        writer.save(self.model.stored(), self.trainer.stored_moments(), state,
                    self.data.tokenizer.to_json(), final=final)

    def _config_json(self) -> bytes:
        values = {"settings": self.settings.to_dict(), "model": self.config.to_dict(),
                  "backend": self.backend.name}
        return (json.dumps(values, indent=2) + "\n").encode()

    def _progress_bar(self) -> tqdm:
        # A log file keeps every state of the bar: few of them, then.
        interval = 0.25 if sys.stderr.isatty() else 10.0
        return tqdm(total=self.settings.steps, initial=self.progress.step, unit="step",
                    desc=self.settings.name, dynamic_ncols=True, mininterval=interval)

    def describe(self) -> str:
        """The run's arithmetic, for the head of its output."""
        settings, batches = self.settings, self.batches
        micro = f"{settings.batch_size} x {settings.context}"
        if settings.accumulate > 1:
            micro = f"{settings.accumulate} x {micro}"
        passes = settings.steps * batches.windows_per_step / batches.windows.count
        weights = f", weights of {settings.init}" if settings.init else ""
        return (f"{settings.name}: {parameter_count(self.config):,} parameters, "
                f"{self.data.tokenizer.vocabulary_size} tokens, backend {self.backend.name}"
                f"{weights}\n"
                f"{settings.steps} steps of {micro} = {batches.tokens_per_step:,} tokens: "
                f"{passes:.2f} passes over {len(self.data.train):,} tokens, "
                f"{len(self.data.held_out):,} held out")


def read_settings(directory: Path) -> Settings:
    """The settings a run directory was started with."""
    path = directory / CONFIG
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise EulerError(f"{directory} is no run directory: it has no {CONFIG}") from None
    except OSError as error:
        raise read_error(error, path) from error
    text = decoded(content, path)
    with error_context(path):
        return Settings.from_dict(field(parse_object(text), "settings", dict))
