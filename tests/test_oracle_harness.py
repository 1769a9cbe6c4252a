"""lm-evaluation-harness with our adapter says what it says with its own model for transformers."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.tokenizer import Tokenizer
from runtime import evaluate
from runtime.cli import run_command
from runtime.convert import export_folder
from runtime.inference.trained import load_trained
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.runners import BACKENDS, backend
from tests.test_convert import NANO, trained_run

pytestmark = pytest.mark.oracle

CONTEXT = 40
CONFIGS = {
    "nano": replace(NANO, context=CONTEXT),
    "llama": replace(NANO, context=CONTEXT, prediction_heads=1, kind="llama", tied_head=True),
    "gpt2": ModelConfig("gpt2", width=24, heads=4, kv_heads=4, layers=2, context=CONTEXT,
                        vocabulary=281, hidden=24, tied_head=True),
}
END = "<|endoftext|>"
SENTENCE = "To be, or not to be: that is the question; whether 'tis nobler in the mind… "
LONG = SENTENCE * 4


@pytest.fixture(scope="module")
def libraries():
    """lm-eval, torch on one thread and transformers; none of them may use the network."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        pytest.importorskip("lm_eval")
        pytest.importorskip("accelerate")
        from lm_eval import simple_evaluate
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from runtime.evaluation import lm_eval_model as harness
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield SimpleNamespace(transformers=transformers, harness=harness, HFLM=HFLM,
                              Instance=Instance, TaskManager=TaskManager,
                              simple_evaluate=simple_evaluate)
        torch.set_num_threads(threads)


def legible_run(directory: Path, config: ModelConfig) -> None:
    """A run of a random model that mostly writes letters, no halves of characters. The tokenizer of
    the llama has every text begin with a token."""
    tensors, first = trained_run(directory, config), load_checkpoint(directory)
    vocabulary = Tokenizer.from_json(first.tokenizer_json).vocabulary
    if config.kind == "llama":
        vocabulary = replace(vocabulary, prefix=(vocabulary.special_tokens[END],))
    table = tensors["embedding.weight" if config.tied_head else "heads.weight"]
    table[..., [id for id, text in vocabulary.token_bytes.items()
                if not re.match(rb"[ -~]+$", text)], :] *= 0.1
    with CheckpointWriter(directory) as writer:
        writer.save(tensors, {}, {**first.state, "step": 4}, Tokenizer(vocabulary).to_json())


@pytest.fixture(scope="module")
def made(libraries, tmp_path_factory):
    """Our model of a kind on each backend, by its name, theirs of the same weights, and where our
    run is. Each made once."""

    @cache
    def make(kind: str) -> SimpleNamespace:
        folder, load = tmp_path_factory.mktemp(kind), libraries.transformers
        legible_run(folder / "run", CONFIGS[kind])
        export_folder(folder / "run", folder / "out")
        ours = {name: libraries.harness.EulerLM(load_trained(folder / "run", backend(name)))
                for name in BACKENDS}
        # Their cache of logits takes a wrong position's where one request's tokens begin another's.
        theirs = libraries.HFLM(
            pretrained=load.AutoModelForCausalLM.from_pretrained(folder / "out").eval(),
            tokenizer=load.AutoTokenizer.from_pretrained(folder / "out"), device="cpu",
            dtype="float32", batch_size=1, logits_cache=False)
        assert theirs.max_length == CONTEXT
        for text in ("", "To be"):
            assert ours["llvm"].tok_encode(text) == theirs.tok_encode(text)
        return SimpleNamespace(ours=ours, theirs=theirs, run=folder / "run")

    return make


@pytest.fixture(params=CONFIGS)
def models(request, made):
    return made(request.param)


@pytest.fixture
def gpt2(made):
    return made("gpt2")


def requests(libraries, kind: str, *arguments: tuple) -> list:
    return [libraries.Instance(request_type=kind, doc={}, arguments=each, idx=0)
            for each in arguments]


def assert_close(ours, theirs) -> None:
    """Log-probabilities and whether they are those of greedy decoding."""
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_loglikelihood(libraries, models):
    pairs = [("To be", " or not"), ("To be", ", or not to be"), ("To be ", "or"), ("To be \n", "x"),
             ("", "To be"), ("", f"{END}To be"), (END, "To be"), (f"{END}To", " be"),
             ("To be", END), (SENTENCE, " end"), (LONG, " end"), (LONG, SENTENCE[:30]),
             ("", SENTENCE[:30]), ("é", "ü€"), ("", "x" + END)]
    pairs += [("which of these:", f" {answer}") for answer in "ABCDEFGH"]
    asked = requests(libraries, "loglikelihood", *pairs)
    expected = models.theirs.loglikelihood(asked, disable_tqdm=True)
    for ours in models.ours.values():
        assert_close(ours.loglikelihood(asked, disable_tqdm=True), expected)


def test_greedy_continuations_are_known_as_such(libraries, models):
    ours, found = models.ours["llvm"], []
    for prompt in (SENTENCE, LONG, "x", END):
        prompt = ours.tok_encode(prompt)[-20:]
        generator, request = ours._generator(ours.max_length), ours._asked({"max_gen_toks": 12})
        generator.reset()
        sampler = request.sampler(ours.trained.tokenizer.vocabulary.ids, 0)
        text = list(generator.stream(prompt, 12, sampler))
        other = (text[6] + 1) % 280
        found += [(None, prompt, text), (None, prompt, text[:1]),
                  (None, prompt, [*text[:6], other, *text[7:]])]
    expected = models.theirs._loglikelihood_tokens(found, disable_tqdm=True)
    assert [greedy for _, greedy in expected] == [True, True, False] * 4
    for ours in models.ours.values():
        assert_close(ours._loglikelihood_tokens(found, disable_tqdm=True), expected)


def test_loglikelihood_rolling(libraries, models):
    """Texts that fill five windows, one, one less a token, one and a token; and one of no token."""
    ours = models.ours["llvm"]
    texts = [LONG, SENTENCE, "x", END, "é" * 30]
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    texts += [letters[:count] for count in (CONTEXT - 1, CONTEXT, CONTEXT + 1)]
    assert -(-len(ours.tok_encode(LONG)) // CONTEXT) >= 5
    asked = requests(libraries, "loglikelihood_rolling", *((text,) for text in [*texts, ""]))
    expected = models.theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    for other in models.ours.values():
        assert other.loglikelihood_rolling(asked, disable_tqdm=True) == (
            pytest.approx(expected, rel=1e-6, abs=1e-4))
    windows = ours._windows(LONG)
    assert [token for _, scored in windows for token in scored] == ours.tok_encode(LONG)


def test_generate_until(libraries, models):
    """Greedy; the contexts of some are cut. Stop strings are pieces of what comes without any."""
    contexts = ("To be", LONG, f"{END}x")
    free = requests(libraries, "generate_until",
                    *((context, {"max_gen_toks": 16, "until": []}) for context in contexts))
    texts = models.theirs.generate_until(free, disable_tqdm=True)
    stops = [re.findall("[ -~]{2,4}", text)[1] for text in texts]
    stopped = [(context, {"max_new_tokens": count, "do_sample": False, "until": until})
               for context, stop in zip(contexts, stops, strict=True)
               for count, until in ((16, [stop]), (16, ["never", stop[1], stop]), (3, stop),
                                    (24, [END]))]
    asked = requests(libraries, "generate_until", *stopped)
    expected = models.theirs.generate_until(asked, disable_tqdm=True)
    assert len(expected[0]) < len(texts[0])
    for ours in models.ours.values():
        assert ours.generate_until(free, disable_tqdm=True) == texts
        assert ours.generate_until(asked, disable_tqdm=True) == expected


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{folder}/rows.jsonl"}}
  cache_dir: "{folder}/cache"
test_split: test
fewshot_split: test
output_type: {name}
metric_list: [{metrics}]
"""
CHOICE = """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
"""
WHOLE = """
doc_to_text: ""
doc_to_target: "{{text}}"
"""
GENERATION = """
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
"""
TASKS = {"multiple_choice": (CHOICE, "acc", "acc_norm"),
         "loglikelihood_rolling": (WHOLE, "word_perplexity", "byte_perplexity", "bits_per_byte"),
         "generate_until": (GENERATION, "exact_match", "bleu")}


def local_tasks(folder: Path) -> Path:
    """A folder of a task of each kind over a handful of documents."""
    (folder / "tasks").mkdir()
    rows = [{"question": f"To be {i} or not to be,", "right": i % 3, "text": SENTENCE * (i + 1),
             "choices": ["that is", "the question", f"to be {i}"]} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, (further, *metrics) in TASKS.items():
        listed = ", ".join(f"{{metric: {metric}}}" for metric in metrics)
        head = TASK.format(name=name, folder=folder, metrics=listed)
        (folder / f"tasks/{name}.yaml").write_text(head + further, encoding="utf-8")
    return folder / "tasks"


@pytest.fixture
def no_survey(libraries, monkeypatch):
    """The harness surveys the machine for its results, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.mark.parametrize("shots", [None, 1])
def test_tasks_from_end_to_end(libraries, gpt2, no_survey, tmp_path, shots):
    folder = local_tasks(tmp_path)
    names = ["multiple_choice", "loglikelihood_rolling"]
    expected = libraries.simple_evaluate(
        gpt2.theirs, tasks=names, num_fewshot=shots, log_samples=False, bootstrap_iters=0,
        task_manager=libraries.TaskManager(include_path=str(folder), include_defaults=False))
    found = libraries.harness.run_tasks(gpt2.ours["llvm"], names, folder, num_fewshot=shots,
                                        bootstrap_iters=0)
    assert found["n-samples"] == expected["n-samples"]
    for name in names:
        assert found["results"][name] == {
            metric: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            for metric, value in expected["results"][name].items()}
    assert "bits_per_byte" in libraries.harness.tables(found)


def test_the_command(libraries, gpt2, no_survey, tmp_path, capsys):
    folder, out = local_tasks(tmp_path), tmp_path / "results.json"
    arguments = ["--checkpoint", str(gpt2.run), "--include-path", str(folder), "--limit", "2",
                 "--tasks", "multiple_choice, generate_until", "--threads", "1", "--batch-size",
                 "4", "--out", str(out)]
    assert run_command(evaluate.main, arguments) == 0
    shown = capsys.readouterr().out
    assert "|multiple_choice" in shown and "|generate_until" in shown
    results = json.loads(out.read_text())
    assert results["n-samples"]["multiple_choice"] == {"original": 6, "effective": 2}
    assert 0 <= results["results"]["multiple_choice"]["acc,none"] <= 1
    assert results["config"]["model"] == "EulerLM" and results["config"]["batch_size"] == 4


# What cannot be


def refused(arguments: list[str], capsys) -> str:
    assert run_command(evaluate.main, arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    (line,) = [line for line in written.err.splitlines() if line.startswith("error: ")]
    assert written.err.endswith(line + "\n")
    return line


def test_tasks_that_cannot_be_are_told_in_one_line(libraries, gpt2, tmp_path, capsys):
    folder = local_tasks(tmp_path)
    choice = (folder / "multiple_choice.yaml").read_text()
    for name, text in {"absent": choice.replace("rows.jsonl", "gone.jsonl"),
                       "hub": choice.replace("dataset_path: json", "dataset_path: some/where"),
                       "empty": "output_type: multiple_choice"}.items():
        (folder / f"{name}.yaml").write_text(
            text.replace("task: multiple_choice", "") + f"\ntask: {name}\n", encoding="utf-8")
    arguments = ["--checkpoint", str(gpt2.run), "--include-path", str(folder), "--tasks"]
    prefix = "error: the tasks {} cannot be loaded: "
    absent = refused([*arguments, "absent"], capsys)
    assert absent.startswith(prefix.format("absent")) and "gone.jsonl" in absent
    assert refused([*arguments, "hub"], capsys).startswith(prefix.format("hub"))
    assert refused([*arguments, "empty"], capsys).startswith(prefix.format("empty"))
    assert refused([*arguments, ", "], capsys) == "error: --tasks names no task"


@pytest.mark.parametrize(("change", "more", "message"), [
    ("doc_to_text: '{{1 // (right - 1)}}'", (), "ZeroDivisionError: integer division"),
    ("", ("--num-fewshot", "50"), "ValueError: Sample larger than population"),
])
def test_tasks_that_cannot_be_run_are_told_in_one_line(libraries, gpt2, tmp_path, capsys, change,
                                                       more, message):
    folder = local_tasks(tmp_path)
    with (folder / "multiple_choice.yaml").open("a") as file:
        file.write(f"\n{change}\n")
    line = refused(["--checkpoint", str(gpt2.run), "--include-path", str(folder), "--tasks",
                    "multiple_choice", *more], capsys)
    assert line.startswith(f"error: the tasks multiple_choice cannot be run: {message}")


def test_a_fault_of_ours_keeps_its_traceback(libraries, gpt2, no_survey, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries.harness.Scorer, "scores", lambda self, requests: 1 // 0)
    ours = libraries.harness.EulerLM(gpt2.ours["reference"].trained)
    with pytest.raises(ZeroDivisionError):
        libraries.harness.run_tasks(ours, ["multiple_choice"], local_tasks(tmp_path))


def test_results_are_written_before_a_reader_that_is_gone_shows(libraries, gpt2, no_survey,
                                                                tmp_path, monkeypatch):
    def gone(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(evaluate, "print", gone, raising=False)
    out = tmp_path / "results.json"
    with pytest.raises(BrokenPipeError):
        evaluate.main(["--checkpoint", str(gpt2.run), "--include-path", str(local_tasks(tmp_path)),
                       "--tasks", "multiple_choice", "--limit", "2", "--out", str(out)])
    assert "multiple_choice" in json.loads(out.read_text())["results"]


def test_an_unknown_task_is_told_with_those_of_like_name(libraries, gpt2, tmp_path, monkeypatch,
                                                         capsys):
    """The harness's own tasks take half a minute to list: another folder stands for theirs."""
    harness, folder = libraries.harness, local_tasks(tmp_path)
    plain = harness._Tasks

    def only_here(**options):
        return plain(**{**options, "include_defaults": False})

    monkeypatch.setattr(harness, "_Tasks", only_here)
    line = refused(["--checkpoint", str(gpt2.run), "--include-path", str(folder),
                    "--tasks", "multiple_choise"], capsys)
    assert line == ("error: lm-eval has no task 'multiple_choise'; names like it: multiple_choice "
                    f"(looked in {folder} too)")


def test_paths_that_are_not_there(libraries, gpt2, tmp_path, capsys):
    run, tasks = ["--checkpoint", str(gpt2.run)], ["--tasks", "x"]
    missing = str(tmp_path / "missing")
    assert missing in refused(["--checkpoint", missing, *tasks], capsys)
    assert refused([*run, *tasks, "--include-path", missing], capsys) == (
        f"error: --include-path {missing} is no directory")
    assert refused([*run, *tasks, "--out", f"{missing}/x.json"], capsys) == (
        f"error: --out {missing}/x.json: its directory does not exist")
    os.mkfifo(tmp_path / "pipe")  # like /dev/null no file, and root can replace that too
    for out in (tmp_path, tmp_path / "pipe"):
        assert refused([*run, *tasks, "--out", str(out)], capsys) == (
            f"error: --out {out} is there and no file that results could replace")


def test_requests_that_cannot_be(libraries, gpt2):
    ours = gpt2.ours["reference"]
    long = ours.tok_encode(LONG)[:CONTEXT + 1]
    with pytest.raises(EulerError, match=f"a continuation has {CONTEXT + 1} tokens; it must"):
        ours._loglikelihood_tokens([(None, [1], long)], disable_tqdm=True)
    with pytest.raises(EulerError, match="a continuation has 0 tokens"):
        ours._loglikelihood_tokens([(None, [1], [])], disable_tqdm=True)
    for arguments, message in (({"max_gen_toks": CONTEXT}, f"context of {CONTEXT}, got {CONTEXT}"),
                               ({"num_beams": 2}, "generation_kwargs has 'num_beams'")):
        asked = requests(libraries, "generate_until", ("x", {}), ("x", arguments))
        with pytest.raises(EulerError, match=message):
            ours.generate_until(asked, disable_tqdm=True)
    with pytest.raises(EulerError, match="the batch size must be a positive whole number, got 'a"):
        libraries.harness.EulerLM(gpt2.run, batch_size="auto")


# What only we have


def test_by_name_in_the_harness(libraries, gpt2):
    from lm_eval.api.registry import get_model

    assert get_model("hf") is libraries.HFLM
    found = get_model("euler").create_from_arg_string(
        f"checkpoint={gpt2.run},backend=reference", {"batch_size": 2, "device": None})
    assert found.trained.model.backend.name == "reference" and found.batch_size == 2
    assert found.max_length == CONTEXT and found.max_gen_toks == CONTEXT // 2


def test_texts_that_are_drawn(libraries, gpt2):
    """A text is drawn anew each time it is asked for, and a second harness draws the same."""
    arguments = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 10}
    asked = requests(libraries, "generate_until", *[("To be", arguments)] * 3, ("", {}))
    trained = gpt2.ours["reference"].trained
    first, second = (libraries.harness.EulerLM(trained).generate_until(asked, disable_tqdm=True)
                     for _ in range(2))
    assert first == second and len(set(first[:3])) == 3 and first[3]
