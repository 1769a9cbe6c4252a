"""Bring a Hugging Face model here, or take a trained one there.

    python -m runtime.convert --from HF_FOLDER --out RUN
    python -m runtime.convert --checkpoint RUN --to HF_FOLDER
    python -m runtime.convert --checkpoint RUN --to MODEL.gguf --format gguf

A Hugging Face folder holds `config.json`, `model.safetensors` (or shards and their index) and
`tokenizer.json`, of class GPT2LMHeadModel or LlamaForCausalLM. Import makes a run directory with
one checkpoint, which `generate` takes, and `train --init`; there is no training run in it that
`--resume` could go on with. Export makes a folder that `transformers` loads; prediction heads after
the first go to `mtp_heads.safetensors` in it, and come back on import. What was imported is
exported as it was: tensors to the bit, with their names and types, and the configuration. What was
trained since then keeps names and configuration, and has the type it was trained in. `--dtype`
gives all parameters another type.

GGUF is llama.cpp's format: one file with weights (f32 unless `--dtype` says otherwise),
configuration and tokenizer, written by the gguf package. It has no place for prediction heads after
the first; `--first-head-only` leaves them out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.parameters import parameter_count
from model.tokenizer import Tokenizer
from runtime.arguments import CHECKPOINT, refuse_together
from runtime.cli import Parser, path, print_notes, run_command
from runtime.exchange.gguf_export import write_gguf
from runtime.exchange.hugging_face_export import write_folder
from runtime.exchange.hugging_face_import import read_folder
from runtime.exchange.import_record import import_record
from runtime.storage.checkpoint import Checkpoint, load_model
from runtime.storage.checkpoint_writer import CheckpointWriter
from runtime.storage.run_directory import claim_run_directory

_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}

#: Arguments that do not go together, and why.
_CONFLICTS = (
    *(("checkpoint", name, "it is for an import") for name in ("out", "tokenizer")),
    *(("from", name, "it is for an export")
      for name in ("to", "format", "first_head_only", "dtype")),
)


def parser() -> Parser:
    p = Parser(prog="python -m runtime.convert", description=__doc__.splitlines()[0])
    given = p.add_mutually_exclusive_group(required=True)
    given.add_argument("--from", type=path, metavar="FOLDER",
                       help="a Hugging Face model folder to import; --out says where to")
    given.add_argument("--checkpoint", type=path, metavar="DIR",
                       help=f"{CHECKPOINT} to export; --to says where to")
    p.add_argument("--out", type=path, metavar="DIR", help="the new run directory")
    p.add_argument("--tokenizer", type=path, metavar="FILE",
                   help="the imported model's tokenizer.json (the one in its folder)")
    p.add_argument("--to", type=path, metavar="PATH",
                   help="the new folder, or with gguf the new file")
    p.add_argument("--format", choices=("hf", "gguf"),
                   help="of the export: hf, a folder for transformers, with prediction heads after "
                        "the first in mtp_heads.safetensors; gguf, a file for llama.cpp (hf)")
    p.add_argument("--first-head-only", action="store_true",
                   help="with gguf: leave the further prediction heads out, for which it has no "
                        "place")
    p.add_argument("--dtype", choices=_DTYPES,
                   help="of the exported parameters (with hf as imported, else as trained; with "
                        "gguf f32)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    refuse_together(arguments, _CONFLICTS)
    folder = getattr(arguments, "from")
    given, destination = ("--from", "out") if folder else ("--checkpoint", "to")
    if getattr(arguments, destination) is None:
        raise EulerError(f"{given} needs --{destination}, where the result goes")
    if arguments.first_head_only and arguments.format != "gguf":
        raise EulerError("--first-head-only goes with --format gguf")
    if arguments.to is not None and arguments.to.endswith(".gguf") and arguments.format is None:
        raise EulerError(f"--to {arguments.to} is named like a GGUF file: add --format gguf, or "
                         "--format hf for a folder of that name")
    if folder:
        import_folder(folder, arguments.out, arguments.tokenizer)
    elif arguments.format == "gguf":
        export_gguf(arguments.checkpoint, arguments.to, _DTYPES[arguments.dtype or "f32"],
                    arguments.first_head_only)
    else:
        export_folder(arguments.checkpoint, arguments.to, _DTYPES.get(arguments.dtype))


def import_folder(folder: Path | str, out: Path | str, tokenizer: Path | str | None = None) -> None:
    """Make the run directory `out` with one checkpoint, the model of a Hugging Face folder."""
    model = read_folder(folder, tokenizer)
    config = model.config
    precision = "f64" if next(iter(model.tensors.values())).dtype == "f8" else "f32"
    state = {"step": 0, "model": config.to_dict(), "source": model.record,
             "settings": {"precision": precision, "context": config.context}}
    with CheckpointWriter(claim_run_directory(out)) as writer:
        saved = writer.save(model.tensors, {}, state, model.tokenizer_json, final=True)
    print(f"{model.record['architecture']}: {parameter_count(config):,} parameters -> {saved}")


def export_folder(checkpoint_path: Path | str, to: Path | str, dtype: str | None = None) -> None:
    """Write the model of a checkpoint to a new Hugging Face folder."""
    checkpoint, config, tokenizer = _load(checkpoint_path)
    write_folder(to, config, checkpoint.tensors, tokenizer, checkpoint.tokenizer_json,
                 import_record(checkpoint, config), dtype)
    print(f"{checkpoint.path}: {parameter_count(config):,} parameters -> {to}")


def export_gguf(checkpoint_path: Path | str, to: Path | str, dtype: str = "F32",
                first_head_only: bool = False) -> None:
    """Write the model of a checkpoint to a new GGUF file; matrices in this type."""
    checkpoint, config, tokenizer = _load(checkpoint_path)
    if config.prediction_heads > 1 and not first_head_only:
        raise EulerError(f"GGUF has no place for {config.prediction_heads - 1} of the model's "
                         f"{config.prediction_heads} prediction heads: leave them out with "
                         "--first-head-only")
    write_gguf(to, config, checkpoint.tensors, tokenizer, dtype,
               import_record(checkpoint, config))
    print(f"{checkpoint.path}: {dtype} -> {to}")


def _load(checkpoint_path: Path | str) -> tuple[Checkpoint, ModelConfig, Tokenizer]:
    checkpoint, config = load_model(checkpoint_path)
    tokenizer = checkpoint.tokenizer(config)
    print_notes(checkpoint.notes)
    return checkpoint, config, tokenizer


if __name__ == "__main__":
    sys.exit(run_command(main))
