"""Text, shards, windows and batches: what is read, in which order, and that nothing is lost."""

import hashlib
from math import log

import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.tokenizer import END_OF_DOCUMENT, train_tokenizer
from runtime.data.batches import BatchStream, ValidationSet, Windows, shuffled
from runtime.data.shards import HEADER_BYTES, MAGIC, read_shard, write_shard
from runtime.data.streams import (
    DEFAULT_TEXT,
    Document,
    TokenStream,
    byte_lengths,
    find_files,
    load_stream,
    load_text,
)


class ByteTokenizer:
    vocabulary_size = 256
    special_tokens = {}

    def encode_document(self, text):
        return list(text.encode())

    def decode_bytes(self, ids):
        return bytes(ids)


def stream_of(*lengths, vocabulary_size=1 << 20):
    """Documents of these lengths whose token at position p of the stream is p."""
    ends = np.cumsum(lengths)
    documents = [
        Document(f"d{i}", np.arange(end - length, end, dtype=np.int32))
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    return TokenStream(documents, vocabulary_size)


# Text files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"caf\xc3\xa9 \xff!", "not UTF-8: byte 0xff at offset 6"),
        (b"cut \xe2\x82", "not UTF-8: byte 0xe2 at offset 4"),
    ],
)
def test_a_bad_text_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EulerError, match=message) as caught:
        load_text([path])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreadable_path_is_a_user_error(tmp_path):
    with pytest.raises(EulerError, match="holds no .txt or .bin"):
        load_text([tmp_path])
    with pytest.raises(EulerError, match="no data file"):
        load_text([])


def test_directories_are_walked_in_order_and_text_is_kept_byte_for_byte(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes("\ufefftwo\r\n".encode())
    (tmp_path / "a.txt").write_bytes(b"one\r")
    (tmp_path / "notes.md").write_bytes(b"not data")
    (tmp_path / "given.md").write_bytes(b"three")
    texts = load_text([tmp_path, tmp_path / "given.md"])
    assert [text.text.encode() for text in texts] == [b"one\r", b"\xef\xbb\xbftwo\r\n", b"three"]
    (tmp_path / "directory.txt").mkdir()
    assert len(find_files([tmp_path])) == 2


def test_the_default_text_ships_whole():
    digest = hashlib.sha256(DEFAULT_TEXT.read_bytes()).hexdigest()
    assert DEFAULT_TEXT.stat().st_size == 1115394
    assert digest == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


# Shards


@pytest.mark.parametrize(("vocabulary", "width"), [(65536, 2), (70001, 4)])
def test_ids_come_back_from_a_shard_as_written(tmp_path, vocabulary, width):
    ids = [0, 4464, 65535] + ([65536, 70000] if vocabulary > 70000 else [])
    write_shard(tmp_path / "x.bin", np.array(ids), vocabulary)
    assert (tmp_path / "x.bin").stat().st_size == HEADER_BYTES + width * len(ids)
    assert read_shard(tmp_path / "x.bin", vocabulary).tolist() == ids
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_shards_of_llm_c_load(tmp_path):
    """Written byte by byte after llm.c's dev/data/data_common.py."""
    for magic, version, dtype, vocabulary in [
        (20240520, 1, "<u2", 50257),
        (20240801, 7, "<u4", 128256),
    ]:
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, 3
        ids = np.array([5, 50256, 7], dtype)
        (tmp_path / "s.bin").write_bytes(header.tobytes() + ids.tobytes())
        assert read_shard(tmp_path / "s.bin", vocabulary).tolist() == [5, 50256, 7]


def test_a_shard_is_not_written_with_an_id_it_cannot_hold(tmp_path):
    for ids, vocabulary in [([1, 70000], 65536), ([1, -1], 65536), ([1, 300], 300)]:
        with pytest.raises(EulerError, match=rf"x.bin: token 1 has id {ids[1]}"):
            write_shard(tmp_path / "x.bin", np.array(ids), vocabulary)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], "promises 100 tokens of 2 bytes, 1224 bytes in all, the file has 1223"),
        (lambda b: b + b"\0\0", "the file has 1226"),
        (lambda b: b[:500], "500 bytes is no token shard"),
        (lambda b: b"", "0 bytes is no token shard"),
        (lambda b: b"\1" + b[1:], "no token shard this program reads"),
        (lambda b: b[:4] + b"\3" + b[5:], "version 3"),
        (lambda b: b[:8] + b"\0" + b[9:HEADER_BYTES], "promises 0 tokens"),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, damage, message):
    path = tmp_path / "x.bin"
    write_shard(path, np.arange(100), 1000)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EulerError, match=message) as caught:
        read_shard(path, 1000)
    assert str(path) in str(caught.value)


def test_a_shard_of_another_width_than_the_tokenizer_needs_is_refused(tmp_path):
    write_shard(tmp_path / "narrow.bin", np.arange(9), 50257)
    write_shard(tmp_path / "wide.bin", np.arange(9), 100_000)
    with pytest.raises(EulerError, match="narrow.bin: holds 16-bit ids.*100000 is stored in 32"):
        read_shard(tmp_path / "narrow.bin", 100_000)
    with pytest.raises(EulerError, match="wide.bin: holds 32-bit ids.*50257 is stored in 16"):
        read_shard(tmp_path / "wide.bin", 50257)


def test_an_id_above_the_vocabulary_is_named_with_its_place_in_the_file(tmp_path):
    tokens = np.arange(40) % 7
    tokens[23] = 300
    path = tmp_path / "x.bin"
    write_shard(path, tokens, 50257)
    stream = TokenStream([Document(str(path), read_shard(path, 50257))], vocabulary_size=256)
    for part, start in [(stream, 20), (stream.slice(15, 40), 5)]:
        with pytest.raises(EulerError, match=r"x.bin: token 23 has id 300, .* ends at 255"):
            part.read(start, 8)
    batches = BatchStream(stream, batch_size=5, context=8)
    with pytest.raises(EulerError, match="token 23 has id 300"):
        batches.batch()


def test_streams_mix_texts_and_shards_and_hold_validation_shards_out(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    write_shard(tmp_path / "c_val_0.bin", np.arange(30), 256)
    write_shard(tmp_path / "d_train_0.bin", np.arange(50), 256)
    stream = load_stream([tmp_path], ByteTokenizer())
    assert stream.starts.tolist() == [0, 5, 35, 85]
    train, validation = stream.split()
    assert (len(train), len(validation)) == (55, 30)
    assert validation.read(0, 99).tolist() == list(range(30))


def test_the_last_tenth_is_held_out():
    train, validation = stream_of(40, 60, 9).split()
    assert train.read(0, 200).tolist() == list(range(99))
    assert validation.read(0, 200).tolist() == list(range(99, 109))
    assert validation.starts.tolist() == [0, 1, 10]


# Windows


def expected_pairs(lengths, heads):
    """Every (position, head, target) that an epoch must hold, from the definition."""
    pairs, start = set(), 0
    for length in lengths:
        for i in range(length):
            for k in range(heads):
                if i + k + 1 < length:
                    pairs.add((start + i, k, start + i + k + 1))
        start += length
    return pairs


@pytest.mark.parametrize(
    "lengths", [(9,), (16,), (17,), (18,), (33,), (3, 20, 1, 2, 30), (8, 8, 8)]
)
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_an_epoch_holds_every_target_once_and_none_across_documents(lengths, heads):
    """Tokens are their own positions, so a window shows what it covers."""
    stream, context = stream_of(*lengths), 8
    windows = Windows(stream, context, heads)
    seen = []
    for index in range(windows.count):
        batch = windows.micro_batch(np.array([index]))
        counted = 0
        for t, k in np.ndindex(context, heads):
            position, target = int(batch.tokens[0, t]), int(batch.targets[0, t, k])
            if target >= 0:
                seen.append((position, k, target))
                counted += 1
            first = stream.starts[stream.document_of(position)]
            keys = batch.tokens[0, batch.lo[0, t] : batch.hi[0, t]]
            assert keys.tolist() == list(range(max(first, batch.tokens[0, 0]), position + 1))
        assert windows.target_counts(np.array([index])).sum() == counted
        assert batch.tokens.max() < len(stream)
    assert len(seen) == len(set(seen))
    assert set(seen) == expected_pairs(lengths, heads)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("tokens", "windows"), [(31, None), (32, None), (33, 1), (128, 4), (129, 4), (130, 5), (257, 8)]
)
def test_token_counts_around_a_batch(tokens, windows, ranks):
    """B 4, T 32: T - 1, T, T + 1, B T, B T + 1, B T + 2 and 2 B T + 1 tokens. The ranks together
    read each window once an epoch; with B T + 1 tokens an epoch of one rank is one batch."""
    build = [
        dict(batch_size=4, context=32, rank=rank, ranks=ranks, seed=1) for rank in range(ranks)
    ]
    if windows is None:
        with pytest.raises(EulerError, match=rf"has {tokens} tokens, .* context 32 takes 33"):
            BatchStream(stream_of(tokens), **build[0])
        return
    streams = [BatchStream(stream_of(tokens), **options) for options in build]
    assert streams[0].windows.count == windows
    starts = []
    while len(starts) < 20 * windows:
        for stream in streams:
            batch = stream.batch().micro_batches[0]
            starts += batch.tokens[:, 0].tolist()
            assert (batch.tokens[:, -1] < tokens - 1).all()
            stream.advance()
    whole = len(starts) // windows
    counts = np.unique(starts[: whole * windows], return_counts=True)
    assert len(counts[0]) == windows and (counts[1] == whole).all()


def test_an_epoch_of_b_times_t_plus_one_tokens_is_exactly_one_batch():
    stream = BatchStream(stream_of(129), batch_size=4, context=32)
    first = stream.batch().micro_batches[0]
    assert sorted(first.tokens.ravel()) == list(range(128))
    assert sorted(first.targets.ravel()) == list(range(1, 129))
    stream.advance()
    assert stream.epoch == 1.0


# Batches


def digests(stream, steps):
    """A hash of every micro-batch of the next `steps` steps, with the step's normalisers."""
    result = []
    for _ in range(steps):
        step = stream.batch()
        for micro in step.micro_batches:
            parts = (micro.tokens, micro.targets, micro.lo, micro.hi, step.inverse_counts)
            result.append(hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest())
        stream.advance()
    return result


def test_a_run_broken_anywhere_reads_what_a_straight_run_reads():
    """40 steps of 3 micro-batches over 2.5 epochs; stopped inside an epoch, at its end, in the
    middle of a step, and resumed with a new loader each time."""
    data = stream_of(1400, 137)  # 192 windows of 8 tokens: 40 * 3 * 4 = 480 = 2.5 * 192

    def loader():
        return BatchStream(data, batch_size=4, context=8, heads=2, seed=7, accumulate=3)

    straight = digests(loader(), 40)
    assert loader().windows.count == 192 and len(set(straight)) == 120
    broken, stream = [], loader()
    for stop in (16, 23, 31, 32, 40):
        done = len(broken) // 3
        broken += digests(stream, stop - done)
        stream.batch()  # begun, never finished
        state, stream = stream.state(), loader()
        stream.restore(state)
    assert broken == straight


def test_epochs_are_shuffled_differently_and_by_the_seed():
    orders = [shuffled(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    # The order is part of the format of a resumable run: it must not change with a release.
    assert shuffled(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_a_step_is_the_same_windows_however_it_is_dealt_out(ranks, accumulate):
    data = stream_of(500, 41)
    size = 8 // ranks // accumulate
    whole = BatchStream(data, batch_size=8, context=16, seed=3)
    parts = [
        BatchStream(
            data, batch_size=size, context=16, seed=3, accumulate=accumulate, rank=r, ranks=ranks
        )
        for r in range(ranks)
    ]
    for _ in range(6):
        steps = [part.batch() for part in parts]
        rows = [steps[r].micro_batches[m].tokens for m in range(accumulate) for r in range(ranks)]
        assert np.concatenate(rows).tolist() == whole.batch().micro_batches[0].tokens.tolist()
        for step in steps:
            assert step.inverse_counts.tolist() == whole.batch().inverse_counts.tolist()
        for part in (*parts, whole):
            part.advance()
    assert parts[0].tokens_per_step == whole.tokens_per_step == 128


def test_the_step_is_normalised_by_the_targets_of_all_its_micro_batches():
    """Micro-batches of 3 and 97 targets: each target weighs 1/100, not 1/3 or 1/97."""
    lengths = [4] + [1] * 96 + [98] + [1] * 2
    stream = BatchStream(stream_of(*lengths), batch_size=1, context=100, heads=1, accumulate=2)
    step = stream.batch()
    counts = sorted(int((micro.targets >= 0).sum()) for micro in step.micro_batches)
    assert counts == [3, 97]
    assert step.target_counts.tolist() == [100] and step.inverse_counts.tolist() == [0.01]


def test_a_head_without_targets_is_normalised_by_zero_not_infinity():
    stream = BatchStream(stream_of(*[2] * 20), batch_size=2, context=8, heads=3)
    step = stream.batch()
    assert step.target_counts.tolist() == [8, 0, 0]
    assert step.inverse_counts.tolist() == [1 / 8, 0.0, 0.0]


@pytest.mark.parametrize("change", ["seed", "context", "data"])
def test_resuming_on_other_data_is_refused(change):
    options = dict(batch_size=2, context=8, seed=1)
    state = BatchStream(stream_of(100), **options).state()
    data = stream_of(100)
    if change == "data":
        data = TokenStream([Document("other", data.documents[0].tokens[::-1])], 1000)
    else:
        options[change] += 1
    with pytest.raises(EulerError, match=f"checkpoint's {change} is"):
        BatchStream(data, **options).restore(state)


# Validation


def test_validation_does_not_depend_on_the_batch_size():
    """A made-up loss a target: what the batches add up to is its mean over all targets."""
    data = stream_of(70, 35)
    lengths = np.arange(200) % 5
    results = []
    for batch_size in (1, 2, 5, 64):
        validation = ValidationSet(
            data, batch_size=batch_size, context=16, heads=2, byte_lengths=lengths
        )
        total = np.zeros(2)
        for batch in validation.batches():
            assert batch.tokens.shape == (batch_size, 16)
            losses = np.where(batch.targets >= 0, batch.targets * 0.5, 0)
            total += losses.sum((0, 1)) * validation.inverse_counts
        results.append((total.round(9).tolist(), validation.bytes))
    targets = [*range(1, 70), *range(71, 105)]
    assert results[0][0][0] == pytest.approx(np.mean(targets) * 0.5)
    assert results[0][1] == lengths[targets].sum()
    assert all(result == results[0] for result in results)


def test_bits_per_byte_counts_the_bytes_of_the_targets():
    tokenizer = ByteTokenizer()
    data = TokenStream([Document("x", np.array(tokenizer.encode_document("hellö wörld")))], 256)
    validation = ValidationSet(data, batch_size=1, context=4, byte_lengths=byte_lengths(tokenizer))
    assert validation.bytes == len("hellö wörld".encode()) - 1
    assert validation.metrics(log(256)) == pytest.approx(
        {"val_loss": log(256), "val_bits_per_byte": 8.0}
    )


def test_an_id_that_the_vocabulary_leaves_out_has_no_bytes():
    class Gapped(ByteTokenizer):
        def decode_bytes(self, ids):
            if ids == [7]:
                raise EulerError("no token 7")
            return bytes(ids)

    assert byte_lengths(Gapped()).tolist() == [1] * 7 + [0] + [1] * 248


def test_a_special_token_is_no_text():
    tokenizer = train_tokenizer(["a rose is a rose"], 258, [END_OF_DOCUMENT])
    expected = [1] * 256 + [len(tokenizer.decode_bytes([256])), 0]
    assert byte_lengths(tokenizer).tolist() == expected


def test_validation_shorter_than_a_window_is_padded():
    validation = ValidationSet(
        stream_of(3), batch_size=2, context=8, heads=2, byte_lengths=np.ones(9, int)
    )
    (batch,) = validation.batches()
    assert batch.targets[0, :3].tolist() == [[1, 2], [2, -1], [-1, -1]]
    assert (batch.targets[0, 3:] == -1).all() and (batch.targets[1] == -1).all()
    assert validation.target_counts.tolist() == [2, 1] and validation.bytes == 2


@pytest.mark.parametrize("lengths", [(), (1,), (1, 1, 1)])
def test_validation_without_a_target_says_so(lengths):
    validation = ValidationSet(
        TokenStream(stream_of(*lengths).documents, 9) if lengths else TokenStream([], 9),
        batch_size=2,
        context=8,
        byte_lengths=np.ones(9, int),
    )
    assert all((batch.targets == -1).all() for batch in validation.batches())
    with pytest.raises(EulerError, match="no tokens to score"):
        validation.check()
    with pytest.raises(EulerError, match="no tokens to score"):
        validation.metrics(0.0)


def test_a_capped_validation_scores_whole_windows():
    validation = ValidationSet(
        stream_of(1000), batch_size=4, context=16, max_tokens=50, byte_lengths=np.ones(1000, int)
    )
    batches = list(validation.batches())
    assert validation.target_counts.tolist() == [64] and len(batches) == 1
    assert sorted(batches[0].targets.ravel()) == list(range(1, 65))


def test_the_magic_number_is_llm_cs():
    assert MAGIC == 20240520
