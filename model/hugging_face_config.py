"""A Hugging Face `config.json` to and from our model configuration.

Every key is one of three: it is a size or option that we have, it must have the one value that our
model computes, or it does not touch what the model computes (dropout, initial values, ids of
special tokens). Any other key that is set to something is refused by name: a model that is silently
another one is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from euler_ir.errors import EulerError, error_context, shown
from model.config import MOST, MOST_POSITIONS, ModelConfig, RopeScaling
from model.interchange import GPT2, LLAMA, architecture
from model.json_values import check_whole, is_positive_number

_MODEL_TYPES = {"gpt2": GPT2, "llama": LLAMA}

# Ours -> theirs, with the value that a missing key means; without one it must be there.
_MISSING = object()
_SIZES = {
    GPT2: {"width": ("n_embd", _MISSING), "heads": ("n_head", _MISSING),
           "layers": ("n_layer", _MISSING), "context": ("n_positions", _MISSING),
           "vocabulary": ("vocab_size", _MISSING), "hidden": ("n_inner", None),
           "norm_eps": ("layer_norm_epsilon", 1e-5), "tied_head": ("tie_word_embeddings", True)},
    LLAMA: {"width": ("hidden_size", _MISSING), "heads": ("num_attention_heads", _MISSING),
            "kv_heads": ("num_key_value_heads", None), "layers": ("num_hidden_layers", _MISSING),
            "context": ("max_position_embeddings", _MISSING),
            "vocabulary": ("vocab_size", _MISSING), "hidden": ("intermediate_size", _MISSING),
            "norm_eps": ("rms_norm_eps", 1e-6), "tied_head": ("tie_word_embeddings", False),
            "given_head_size": ("head_dim", None)},
}

# The options of each rotary scaling, ours -> theirs.
_SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {"factor": "factor", "low_freq_factor": "low_freq_factor",
               "high_freq_factor": "high_freq_factor",
               "original_context": "original_max_position_embeddings"},
}

# What must have one of these values, where it is there.
_REQUIRED: dict[str, dict[str, tuple]] = {
    GPT2: {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
           "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
           "add_cross_attention": (False,)},
    LLAMA: {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
            "partial_rotary_factor": (1, 1.0), "pretraining_tp": (1,)},
}
_REQUIRED_OF_ALL: dict[str, tuple] = {"is_encoder_decoder": (False,), "chunk_size_feed_forward":
                                      (0,), "is_decoder": (False, True)}

# Bookkeeping, training-time settings and defaults of text generation.
_HARMLESS = frozenset("""
    _name_or_path _attn_implementation_autoset architectures model_type transformers_version dtype
    torch_dtype use_cache bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    initializer_range initializer_cutoff_factor attention_dropout attn_pdrop embd_pdrop resid_pdrop
    dropout gradient_checkpointing n_ctx output_attentions output_hidden_states return_dict
    torchscript use_bfloat16 tf_legacy_loss summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout id2label label2id problem_type finetuning_task
    task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    prefix tokenizer_class rope_theta rope_scaling rope_parameters
""".split())


def read_config(document: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a `config.json`, with one prediction head.

    Raises EulerError naming the key whose value cannot be."""
    with error_context("config.json"):
        return _read_config(document)


def _read_config(document: Mapping[str, Any]) -> ModelConfig:
    hf_class = _architecture_of(document)
    sizes = {ours: document.get(theirs, default)
             for ours, (theirs, default) in _SIZES[hf_class].items()}
    for ours, (theirs, _) in _SIZES[hf_class].items():
        _check_size(theirs, ours, sizes[ours])
    _refuse_others(document, hf_class)
    if hf_class == GPT2:
        sizes["kv_heads"] = sizes["heads"]
        sizes["hidden"] = sizes["hidden"] or 4 * sizes["width"]
        if document.get("n_ctx", sizes["context"]) != sizes["context"]:
            raise EulerError(f"n_ctx {shown(document['n_ctx'])} is not n_positions "
                             f"{sizes['context']}")
        return ModelConfig("gpt2", **sizes)
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    if (sizes["given_head_size"] or 0) * sizes["heads"] == sizes["width"]:
        sizes["given_head_size"] = None
    base, scaling = _read_rotary(document)
    return ModelConfig("llama", rope_base=base, rope_scaling=scaling, **sizes)


def write_config(config: ModelConfig, dtype: str, begin: int | None,
                 end: int | None) -> dict[str, Any]:
    """The `config.json` of a model whose tensors have the type `dtype` (float32, ...), and whose
    texts begin and end with these ids.

    Raises EulerError for a model that Hugging Face's classes have no place for."""
    hf_class = architecture(config)
    model_type = next(name for name, known in _MODEL_TYPES.items() if known == hf_class)
    document = {"architectures": [hf_class], "model_type": model_type}
    document |= {theirs: getattr(config, ours) for ours, (theirs, _) in _SIZES[hf_class].items()}
    if hf_class == GPT2:
        document["activation_function"] = "gelu_new"
    else:
        document |= {"head_dim": config.head_size, "hidden_act": "silu", "attention_bias": False,
                     "mlp_bias": False, "rope_theta": config.rope_base,
                     "rope_scaling": _write_scaling(config.rope_scaling)}
    # Null where there is none: the classes' own defaults are ids of other vocabularies.
    return document | {"bos_token_id": begin, "eos_token_id": end, "torch_dtype": dtype}


def _architecture_of(document: Mapping[str, Any]) -> str:
    model_type, named = document.get("model_type"), document.get("architectures")
    if named is None and isinstance(model_type, str):
        named = [_MODEL_TYPES.get(model_type, model_type)]
    if not isinstance(named, list) or named not in ([GPT2], [LLAMA]):
        raise EulerError(f"architectures {shown(named)} is not supported; it must be "
                         f"[{GPT2!r}] or [{LLAMA!r}]")
    if model_type is not None and _MODEL_TYPES.get(str(model_type)) != named[0]:
        raise EulerError(f"model_type {shown(model_type)} does not go with {named[0]}")
    return named[0]


def _check_size(theirs: str, ours: str, value: object) -> None:
    """Raise EulerError unless the value of a key has its type and a sensible magnitude."""
    most = MOST_POSITIONS if ours == "context" else MOST
    if value is _MISSING:
        raise EulerError(f"{theirs} is missing")
    if ours == "norm_eps":
        _positive_number(theirs, value)
    elif ours == "tied_head":
        if type(value) is not bool:
            raise EulerError(f"{theirs} must be true or false, got {shown(value)}")
    elif value is not None:
        check_whole(theirs, value, 1, most)
    elif ours not in ("hidden", "kv_heads", "given_head_size"):
        raise EulerError(f"{theirs} must be a whole number, got null")


def _positive_number(name: str, value: object) -> float:
    if not is_positive_number(value):
        raise EulerError(f"{name} must be a positive number, got {shown(value)}")
    return float(value)


def _refuse_others(document: Mapping[str, Any], hf_class: str) -> None:
    required = _REQUIRED[hf_class] | _REQUIRED_OF_ALL
    known = {theirs for theirs, _ in _SIZES[hf_class].values()} | _HARMLESS
    for key, value in document.items():
        if key in required:
            if value not in required[key]:
                raise EulerError(f"{key} {shown(value)} is not supported; it must be "
                                 f"{required[key][0]!r}")
        elif key not in known and value not in (None, False, {}, []):
            raise EulerError(f"{shown(key)} {shown(value)} is not supported: it is "
                             f"unknown what it changes in {hf_class}")


def _read_rotary(document: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling. Older files have them as `rope_theta` and `rope_scaling`, newer
    both in `rope_parameters`; where they are there twice they must agree."""
    base = document.get("rope_theta")
    scalings = []
    for key in ("rope_scaling", "rope_parameters"):
        options = document.get(key)
        if options is None:
            continue
        if not isinstance(options, dict):
            raise EulerError(f"{key} must be an object or null, got {shown(options)}")
        scalings.append(_read_scaling(key, options))
        inner = options.get("rope_theta", base)
        if base is not None and inner != base:
            raise EulerError(f"rope_theta is {shown(base)} and, in {key}, "
                             f"{shown(inner)}")
        base = inner
    if len(set(scalings)) > 1:
        raise EulerError("rope_scaling and rope_parameters do not say the same")
    return (10000.0 if base is None else _positive_number("rope_theta", base),
            scalings[0] if scalings else None)


def _read_scaling(key: str, options: Mapping[str, Any]) -> RopeScaling | None:
    kind = options.get("rope_type", options.get("type", "default"))
    if options.get("type", kind) != kind:
        raise EulerError(f"{key} has the rope_type {shown(kind)} and the type "
                         f"{shown(options['type'])}")
    if kind not in ("default", *_SCALINGS):
        raise EulerError(f"{key} of type {shown(kind)} is not supported; it must be "
                         f"null, 'default' or one of {', '.join(map(repr, _SCALINGS))}")
    names = _SCALINGS.get(kind, {})
    for option in set(options) - {"rope_type", "type", "rope_theta", *names.values()}:
        if options[option] not in _REQUIRED[LLAMA].get(option, (None,)):
            raise EulerError(f"{key} option {shown(option)} = "
                             f"{shown(options[option])} is not supported")
    if kind == "default":
        return None
    values = {}
    for ours, theirs in names.items():
        values[ours] = options.get(theirs, _MISSING)
        if ours == "original_context":
            _check_size(f"{key} {theirs}", "context", values[ours])
        elif values[ours] is _MISSING:
            raise EulerError(f"{key} has no {theirs}")
        else:
            values[ours] = _positive_number(f"{key} option {theirs}", values[ours])
    with error_context(key):
        return RopeScaling(kind, **values)


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    options = {theirs: getattr(scaling, ours) for ours, theirs in _SCALINGS[scaling.kind].items()}
    # Until 4.42 transformers knew "type" alone, and refused any third key; later ones know both.
    return {"type" if scaling.kind == "linear" else "rope_type": scaling.kind, **options}
