"""Scores are those of an f64 log-softmax over all logits of one forward pass, however requests are
batched, padded and shared."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from euler_ir import interpreter
from euler_ir.errors import EulerError
from euler_ir.types import F32, F64
from model.config import PRESETS, shrink
from runtime.engine import Model
from runtime.evaluation.scoring import Scorer, ScoreRequest, _lengths, _shared_rows
from runtime.gradcheck import well_conditioned_weights
from tests.models import contents, logits_function
from tests.runners import BACKENDS, backend

CONTEXT = 72  # rows of 32, 64 and 72 tokens
CONFIGS = {kind: replace(shrink(PRESETS[name]), context=CONTEXT) for kind, name in
           {"nano": "nano-1m", "llama": "llama-124m", "gpt2": "gpt2-124m"}.items()}
VOCABULARY = CONFIGS["nano"].vocabulary
TOKENS = np.random.default_rng(8).integers(0, VOCABULARY, 4 * CONTEXT).tolist()
every_backend = pytest.mark.parametrize("name", BACKENDS)
every_kind = pytest.mark.parametrize("kind", CONFIGS)


def model(kind: str, name="reference", dtype=F32, **changes: np.ndarray) -> Model:
    """`changes` takes the place of weights, with their dots written as underscores."""
    result = Model(CONFIGS[kind], backend(name), dtype)
    weights = well_conditioned_weights(CONFIGS[kind], 1)
    for key in changes:
        weights[key.replace("_", ".", 1)] = changes[key]
    result.load(weights)
    return result


@cache
def scorer(kind: str, name: str) -> Scorer:
    return Scorer(model(kind, name), rows=3)


@cache
def logits_at_every_position(kind: str):
    return logits_function(CONFIGS[kind], 1, CONTEXT, F64)


def log_softmax(reference: Model, kind: str, request: ScoreRequest) -> np.ndarray:
    """[scored, V] of the logits that predict the request's scored tokens; all in f64."""
    count = len(request.tokens) - 1
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, :count] = request.tokens[:-1]
    logits = interpreter.run(logits_at_every_position(kind), {
        **contents(reference.bound), "tokens": tokens, "lo": np.zeros_like(tokens),
        "hi": np.arange(1, CONTEXT + 1, dtype=np.int32)[None]})["logits"]
    logits = logits[0, count - request.scored:count]
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def assert_scores(found: Scorer, reference: Model, kind: str, requests, atol=1e-5) -> None:
    numbers = []
    for number, score in found.scores(requests):
        request = requests[number]
        expected = log_softmax(reference, kind, request)
        targets = np.array(request.targets)
        chosen = expected[np.arange(len(targets)), targets]
        assert score.log_probabilities.dtype == np.float64
        np.testing.assert_allclose(score.log_probabilities, chosen, rtol=0, atol=atol)
        np.testing.assert_array_equal(score.greedy, expected.argmax(-1) == targets)
        assert score.total == pytest.approx(chosen.sum(), abs=atol * len(targets))
        numbers.append(number)
    assert sorted(numbers) == list(range(len(requests)))


def greedy_request(kind: str, count: int, scored: int) -> ScoreRequest:
    """A request whose scored tokens are the likeliest ones."""
    reference, tokens = model(kind, dtype=F64), TOKENS[:count - scored]
    for _ in range(scored):
        after = log_softmax(reference, kind, ScoreRequest([*tokens, 0], 1))
        tokens = [*tokens, int(after[0].argmax())]
    return ScoreRequest(tokens, scored)


@every_backend
@every_kind
def test_scores_are_those_of_a_log_softmax_over_all_logits(name, kind):
    """Inputs as long as each compiled length, one shorter and one longer; one token or all scored;
    more requests than rows of a batch."""
    requests = [ScoreRequest(TOKENS[start:start + inputs + 1], scored)
                for start, inputs in enumerate((1, 2, 31, 32, 33, 63, 64, 65, 71, 72))
                for scored in {1, (inputs + 1) // 2, inputs}]
    requests += [greedy_request(kind, 12, 4), greedy_request(kind, 40, 1)]
    found = scorer(kind, name)
    assert_scores(found, model(kind, dtype=F64), kind, requests)
    assert found._lengths == [32, 64, 72] == sorted(found._programs)
    scores = dict(found.scores(requests[-2:]))
    assert scores[0].greedy.tolist() == [True] * 4 and scores[1].greedy.tolist() == [True]


@every_backend
def test_in_f64_as_well(name):
    found = Scorer(model("nano", name, F64), rows=2)
    assert_scores(found, model("nano", dtype=F64), "nano", [ScoreRequest(TOKENS[:20], 19)],
                  atol=1e-13)


@every_backend
def test_requests_that_begin_others_share_their_rows(name, monkeypatch):
    """And score as they do alone."""
    found, question = scorer("nano", name), TOKENS[:10]
    requests = [ScoreRequest([*question, *answer], len(answer))
                for answer in ([1], [2], [3], [1, 2], [1, 3, 4], [5, 6])]
    requests += [ScoreRequest(question[:4], 3), ScoreRequest([0, *question], 2)]
    batches = []
    run = found._hidden_states
    monkeypatch.setattr(found, "_hidden_states", lambda rows: batches.append(rows) or run(rows))
    assert_scores(found, model("nano", dtype=F64), "nano", requests)
    # [1, 3], [1] and [5] after the question, and the row that begins with 0.
    assert sum(map(len, batches)) == 3


def test_rows_are_shared_by_all_that_can_and_by_no_other():
    requests = [ScoreRequest(tokens, 1) for tokens in
                ([7, 7, 7], [1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 4, 9], [1, 2, 9], [1, 9], [2, 9])]
    rows = _shared_rows(requests)
    assert [(row.tokens, sorted(row.requests)) for row in rows] == [
        ((1, 2, 4), [3]), ((1, 2, 3), [1, 2, 4, 5]), ((7, 7), [0]), ((2,), [6])]


def test_a_score_does_not_depend_on_what_it_is_batched_with():
    found = scorer("nano", "llvm")
    requests = [ScoreRequest(TOKENS[start:start + 20], 7) for start in range(5)]
    together = dict(found.scores(requests))
    for number, request in enumerate(requests):
        (_, alone), = found.scores([request])
        assert alone.log_probabilities.tobytes() == together[number].log_probabilities.tobytes()


@every_backend
def test_of_equal_tokens_the_lowest_id_is_the_greedy_one(name):
    """As a sampler takes them. Rows 9 and 4 of head 0 are the same, and largest after 3 tokens."""
    tokens = TOKENS[:3]
    heads = well_conditioned_weights(CONFIGS["nano"], 1)["heads.weight"]
    request = ScoreRequest([*tokens, 0], 1)
    likeliest = log_softmax(model("nano", dtype=F64), "nano", request).argmax()
    heads[0, [9, 4]] = heads[0, likeliest]
    heads[0, likeliest] = -heads[0, 4] if likeliest not in (4, 9) else heads[0, 4]
    found = Scorer(model("nano", name, heads_weight=heads), rows=2)
    scores = dict(found.scores([ScoreRequest([*tokens, 9], 1), ScoreRequest([*tokens, 4], 1)]))
    assert not scores[0].greedy[0] and scores[1].greedy[0]
    assert scores[0].total == scores[1].total


@every_backend
def test_rows_that_pad_the_vocabulary_take_no_part(name):
    """They have logits of 0, and all others are far below."""
    config = CONFIGS["gpt2"]
    assert config.padded_vocabulary > config.vocabulary and config.tied_head
    changes = {"norm_weight": np.zeros(config.width), "norm_bias": np.full(config.width, -3.0),
               "embedding_weight": np.abs(
                   well_conditioned_weights(config, 1)["embedding.weight"]) + 1}
    reference = model("gpt2", dtype=F64, **changes)
    requests = [ScoreRequest([*TOKENS[:5], target], 1) for target in range(config.vocabulary)]
    expected = log_softmax(reference, "gpt2", requests[0])
    assert np.exp(expected).sum() == pytest.approx(1)
    found = Scorer(model("gpt2", name, **changes), rows=2)
    assert_scores(found, reference, "gpt2", requests)
    assert sum(score.greedy[0] for _, score in found.scores(requests)) == 1


def test_a_shorter_context_than_the_model_has():
    found = Scorer(model("llama"), context=40, rows=2)
    assert_scores(found, model("llama", dtype=F64), "llama", [ScoreRequest(TOKENS[:41], 40)])
    with pytest.raises(EulerError, match="the text has 42 tokens, .* at most 41 can be scored"):
        found.scores([ScoreRequest(TOKENS[:42], 1)])
    assert _lengths(40) == [32, 40] and _lengths(32) == [32] and _lengths(5) == [5]


@pytest.mark.parametrize(("tokens", "scored", "message"), [
    ([1, 2], 0, "of 2 tokens 0 are to be scored: it must be at least one"),
    ([1, 2], 2, "of 2 tokens 2 are to be scored"),
    ([1], 1, "of 1 tokens 1"),
    ([], 0, "of 0 tokens 0"),
    ([0] * (CONTEXT + 2), 1, f"the text has {CONTEXT + 2} tokens"),
    ([1, VOCABULARY], 1, f"{VOCABULARY} is not a token id: the model's ids go from 0 to 12"),
    ([-1, 2], 1, "-1 is not a token id"),
])
def test_requests_that_cannot_be_scored_are_refused_before_any_is(tokens, scored, message):
    with pytest.raises(EulerError, match=message):
        scorer("nano", "reference").scores([ScoreRequest([1, 2], 1), ScoreRequest(tokens, scored)])


@pytest.mark.parametrize("context", [0, CONTEXT + 1])
def test_a_context_that_the_positions_do_not_cover_is_refused(context):
    with pytest.raises(EulerError, match=f"the context must be 1 to {CONTEXT} tokens"):
        Scorer(model("nano"), context)


@every_backend
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_told(name, broken):
    weight = np.ones(CONFIGS["nano"].width)
    weight[0] = broken
    found = Scorer(model("nano", name, norm_weight=weight), rows=2)
    with pytest.raises(EulerError, match="hold NaN or infinity"), np.errstate(invalid="ignore"):
        list(found.scores([ScoreRequest([1, 2], 1)]))
