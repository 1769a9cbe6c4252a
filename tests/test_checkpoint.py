"""Checkpoints: what comes back, what is kept, and that nothing half-written is ever taken."""

import errno
import itertools
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import runtime.storage.checkpoint
import runtime.storage.checkpoint_writer
from euler_ir.errors import EulerError
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from runtime.storage.files import write_error
from runtime.storage.tensorfile import FileRecord, read_tensors, read_text, write_tensors

ROOT = Path(__file__).parent.parent
TOKENIZER = '{"vocab": "é"}'


def contents(step, size=300):
    """Parameters, moments and state that tell which step they belong to."""
    tensors = {"w": np.full((3, size), step, np.float32), "b": np.arange(7.0) + step}
    moments = {"m.w": tensors["w"] * 2, "v.w": tensors["w"] * 3, "t": np.int64(step)[None]}
    return tensors, moments, {"step": step, "lr": 0.1 + step, "data": {"position": 4 * step}}


def save(writer, step, **options):
    return writer.save(*contents(step), TOKENIZER, **options)


def steps(run_dir):
    return sorted(int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step-*"))


def leftovers(run_dir):
    return [p.name for p in (run_dir / "checkpoints").glob(".*")]


def assert_is_step(loaded, step):
    tensors, moments, state = contents(step)
    assert loaded.step == step and loaded.state == state and loaded.tokenizer_json == TOKENIZER
    for expected, found in [(tensors, loaded.tensors), (moments, loaded.moments)]:
        assert expected.keys() == found.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.fixture
def run(tmp_path):
    """A run with whole checkpoints of steps 10 and 20."""
    with CheckpointWriter(tmp_path) as writer:
        save(writer, 10)
        save(writer, 20)
    return tmp_path


# What comes back


def test_the_newest_checkpoint_comes_back_as_it_was_saved(run):
    assert_is_step(load_checkpoint(run), 20)
    assert_is_step(load_checkpoint(str(run / "checkpoints" / "step-000010")), 10)
    assert load_checkpoint(run, with_moments=False).moments == {}
    assert sorted(p.name for p in (run / "checkpoints" / "step-000020").iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json",
    ]  # fmt: skip


def test_tensor_files_are_what_the_safetensors_library_reads(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "f64": rng.standard_normal((2, 3)),
        "f16": rng.standard_normal((3, 5, 7)).astype(np.float16),
        "i32": np.arange(2000, dtype=np.int32),
        "transposed": rng.standard_normal((40, 30)).astype(np.float32).T,
        "nothing": np.zeros((0, 4), np.float32),
        "scalar": np.array(True),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"x" * 1_000_000)  # longer: what it held before must be gone
    record = write_tensors(path, tensors)
    assert path.stat().st_size == record.bytes
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_bfloat16_comes_back_bit_for_bit(tmp_path):
    bits = np.arange(1, 65536, 13, dtype=np.uint16)
    with CheckpointWriter(tmp_path) as writer:
        writer.save({"w": bits.view(ml_dtypes.bfloat16)}, {}, {"step": 1}, "")
    loaded = load_checkpoint(tmp_path).tensors["w"]
    assert loaded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded.view(np.uint16), bits)


@pytest.mark.parametrize("prepare", [["checkpoints"], []])
def test_a_run_without_a_checkpoint_yet_loads_as_none(tmp_path, prepare):
    (tmp_path / "config.json").write_text("{}")
    for name in prepare:
        (tmp_path / name).mkdir()
    assert load_checkpoint(tmp_path) is None


def test_what_is_no_run_and_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(EulerError, match="neither a run directory .* nor a checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(EulerError, match="nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(EulerError, match=f"Hugging Face folder, .* --from {tmp_path}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"w": (3, 300), "b": (7,), "c": (1,)}, "has no tensor c, which the model needs"),
        ({"w": (3, 301), "b": (7,)}, r"w has shape \[3, 300\], not \[3, 301\]"),
        ({"w": (3, 300)}, "has a tensor b, which the model does not know"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(run, expected, message):
    loaded = load_checkpoint(run)
    loaded.check_shapes({"w": (3, 300), "b": (7,)})
    with pytest.raises(EulerError, match=message) as caught:
        loaded.check_shapes(expected)
    assert "model.safetensors" in str(caught.value)
    moments = {name: array.shape for name, array in loaded.moments.items()}
    loaded.check_moments(moments)
    with pytest.raises(EulerError, match="optimizer.safetensors has no tensor m.lost"):
        loaded.check_moments({**moments, "m.lost": (3,)})


# Damage


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "zeroed"])
def test_a_broken_file_is_named_and_the_checkpoint_before_it_is_taken(run, name, damage):
    newest = run / "checkpoints" / "step-000020"
    file = newest / name
    content = file.read_bytes()
    half = len(content) // 2
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {
                "empty": b"",
                "cut": content[:-1] if name != "state.json" else content[:half],
                "longer": content + b"x",
                "zeroed": content[:half] + b"\0" * (len(content) - half),
            }[damage]
        )
    with pytest.raises(EulerError) as caught:
        load_checkpoint(newest)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)

    loaded = load_checkpoint(run)
    assert_is_step(loaded, 10)
    assert loaded.notes == [str(caught.value)]
    shutil.rmtree(run / "checkpoints" / "step-000010")
    with pytest.raises(EulerError, match="has no whole checkpoint: .*" + name):
        load_checkpoint(run)


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_a_run_that_goes_on_while_it_is_read_is_not_damaged(tmp_path, monkeypatch, saves):
    """Before each of the reader's first looks at tensors the run saves so many times."""
    left = iter(range(1, 1 + 5 * saves))
    read = runtime.storage.checkpoint.read_tensors

    def read_while_saving(*arguments):
        for step in itertools.islice(left, saves):
            save(writer, step)
        return read(*arguments)

    monkeypatch.setattr(runtime.storage.checkpoint, "read_tensors", read_while_saving)
    monkeypatch.setattr(runtime.storage.checkpoint_writer, "SYNC_SECONDS", 0.0)
    with CheckpointWriter(tmp_path) as writer:
        save(writer, 0)
        loaded = load_checkpoint(tmp_path)
    assert_is_step(loaded, loaded.step)
    assert loaded.notes == []


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(run, name):
    newest = run / "checkpoints" / "step-000020"
    content = (newest / name).read_bytes()
    random.seed(5)
    found = 0
    for _ in range(150):
        place, bit = random.randrange(len(content)), random.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        (newest / name).write_bytes(flipped)
        try:
            # White space in state.json may turn into other white space.
            assert_is_step(load_checkpoint(newest), 20)
        except EulerError as error:
            assert name in str(error)
            found += 1
    assert found >= (150 if name != "state.json" else 140)


def test_swapped_blocks_are_found(tmp_path):
    """A plain sum of words would not see it."""
    values = np.arange(4096, dtype=np.float64)
    with CheckpointWriter(tmp_path) as writer:
        path = writer.save({"w": values}, {}, {"step": 1}, "") / "model.safetensors"
    content = path.read_bytes()
    start = len(content) - values.nbytes
    swapped = values.reshape(8, -1)[[0, 3, 2, 1, 4, 5, 6, 7]]
    path.write_bytes(content[:start] + swapped.tobytes())
    with pytest.raises(EulerError, match="model.safetensors is damaged"):
        load_checkpoint(tmp_path)


def test_a_newer_format_is_not_taken_for_damage(run):
    state = run / "checkpoints" / "step-000020" / "state.json"
    document = json.loads(state.read_text()) | {"format_version": 99}
    state.write_text(json.dumps(document))
    with pytest.raises(EulerError, match="format 99, this program reads up to 1"):
        load_checkpoint(run)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FORGED_HEADERS = [
    b"", b"{", b"\xff", b"[" * 5000, b"9" * 5000, b"[]", b"null", b'"a"',
    *(json.dumps({"a": entry}).encode() for entry in [
        None, 1, [], {}, ENTRY | {"dtype": "F8"}, ENTRY | {"dtype": []}, ENTRY | {"shape": 2},
        ENTRY | {"shape": [-2]}, ENTRY | {"shape": [2.0]}, ENTRY | {"shape": [True, 2]},
        ENTRY | {"shape": [2**62, 8]}, ENTRY | {"shape": [0, 2**70], "data_offsets": [0, 0]},
        ENTRY | {"shape": [0] + [2**20] * 9, "data_offsets": [0, 0]},
        ENTRY | {"shape": [1] * 70 + [2]}, ENTRY | {"data_offsets": [0]},
        ENTRY | {"data_offsets": [0, 8, 8]}, ENTRY | {"data_offsets": [-8, 0]},
        ENTRY | {"data_offsets": [8, 0]}, ENTRY | {"data_offsets": [4, 12]},
        ENTRY | {"data_offsets": [0, 2**64]}, ENTRY | {"data_offsets": ["0", "8"]},
    ]),
]


@pytest.mark.parametrize("header", FORGED_HEADERS, ids=lambda header: str(header[:60]))
def test_headers_that_no_save_writes_are_refused(tmp_path, header):
    """Whatever the record says: a checksum is no seal."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(EulerError, match="x.safetensors is damaged: it") as caught:
        read_tensors(path, FileRecord(path.stat().st_size, 0))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("length", [1, 2**63, 2**64 - 1])
def test_headers_longer_than_the_file_are_refused(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length)[:7 if length == 1 else 8])
    with pytest.raises(EulerError, match="it has no header of a safetensors file"):
        read_tensors(path, FileRecord(path.stat().st_size, 0))


def test_what_is_no_file_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"a\xff")
    with pytest.raises(EulerError, match="text is not UTF-8 at byte 1"):
        read_text(tmp_path / "text", FileRecord(2, zlib.crc32(b"a\xff")))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(EulerError, match=f"{name} is not a regular file"):
            read_text(tmp_path / name, FileRecord(0, 0))


# What is kept


def test_the_newest_two_and_the_last_one_forced_to_disk_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.storage.checkpoint_writer, "SYNC_SECONDS", 1e9)
    with CheckpointWriter(tmp_path) as writer:
        for step in range(10, 70, 10):
            save(writer, step)  # the first save is always forced
        assert steps(tmp_path) == [10, 50, 60]
        save(writer, 60, final=True)
        assert steps(tmp_path) == [50, 60]
    assert leftovers(tmp_path) == []
    assert_is_step(load_checkpoint(tmp_path), 60)


def test_a_reused_directory_holds_only_the_new_checkpoint(tmp_path, monkeypatch):
    """Shrinking and growing tensors through the same files."""
    monkeypatch.setattr(runtime.storage.checkpoint_writer, "SYNC_SECONDS", 0)
    with CheckpointWriter(tmp_path, keep=1) as writer:
        for step, size in enumerate([500, 3, 2000, 1, 40, 700], start=1):
            tensors, moments, state = contents(step, size)
            writer.save(tensors, moments, state, TOKENIZER * size)
            loaded = load_checkpoint(tmp_path)
            assert loaded.tensors["w"].shape == (3, size) and (loaded.tensors["w"] == step).all()
            assert loaded.tokenizer_json == TOKENIZER * size


def test_resuming_earlier_gives_up_the_later_checkpoints_and_leftovers(run):
    (run / "checkpoints" / ".writing").mkdir()
    (run / "checkpoints" / ".writing" / "model.safetensors").write_bytes(b"half")
    with CheckpointWriter(run, step=10) as writer:
        assert steps(run) == [10] and leftovers(run) == []
        save(writer, 20)
    assert_is_step(load_checkpoint(run), 20)


def test_a_step_that_is_there_already_is_replaced(run):
    tensors, moments, state = contents(20)
    with CheckpointWriter(run, step=20) as writer:
        writer.save({"w": tensors["w"] + 1}, moments, state, TOKENIZER)
    assert (load_checkpoint(run).tensors["w"] == 21).all()
    assert steps(run) == [10, 20] and leftovers(run) == []


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    with CheckpointWriter(tmp_path), pytest.raises(EulerError, match="another process is training"):
        CheckpointWriter(tmp_path)
    CheckpointWriter(tmp_path).close()


# What goes wrong while saving


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("refused", [0, 1, 3, 5])
def test_a_full_disk_names_the_path_and_leaves_the_old_checkpoint(run, monkeypatch, code, refused):
    """The `refused`-th write of the save fails."""
    calls = 0
    write = runtime.storage.tensorfile._write

    def failing(file, data):
        nonlocal calls
        calls += 1
        if calls > refused:
            raise OSError(code, os.strerror(code))
        write(file, data)

    with CheckpointWriter(run, step=20) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(runtime.storage.tensorfile, "_write", failing)
            with pytest.raises(EulerError, match="step-000030.*free some space") as caught:
                save(writer, 30)
        assert "\n" not in str(caught.value)
        assert steps(run) == [10, 20] and leftovers(run) == []
        save(writer, 30)
    assert_is_step(load_checkpoint(run), 30)


def test_an_error_without_a_number_is_not_told_as_a_full_disk():
    error = write_error(OSError("no reason given"), "out")
    assert str(error) == "cannot write out (no reason given)"


def test_a_file_size_limit_ends_in_the_same_error(run):
    script = (
        "import resource, numpy as np\n"
        "from runtime.storage.checkpoint_writer import CheckpointWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"writer = CheckpointWriter({str(run)!r}, step=20)\n"
        "writer.save({'w': np.zeros(100_000)}, {}, {'step': 30}, '')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "EulerError: cannot write " in ended.stderr and "step-000030" in ended.stderr
    assert steps(run) == [10, 20] and leftovers(run) == []
    assert_is_step(load_checkpoint(run), 20)


def test_ctrl_c_during_a_save_leaves_nothing_half_written(run, monkeypatch):
    def interrupted(file, data):
        raise KeyboardInterrupt

    with CheckpointWriter(run, step=20) as writer, monkeypatch.context() as patch:
        patch.setattr(runtime.storage.tensorfile, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(writer, 30)
    assert steps(run) == [10, 20] and leftovers(run) == []


LIVES = """
import os, random, signal, sys, time
import numpy as np
sys.path[:0] = ["tests"]
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from test_checkpoint import TOKENIZER, contents, leftovers, steps
from pathlib import Path

def live(run_dir, output):
    loaded = load_checkpoint(run_dir)
    step = 0 if loaded is None else loaded.step
    writer = CheckpointWriter(run_dir, step=step)
    while True:
        step += 1
        writer.save(*contents(step, size=100_000), TOKENIZER)
        os.write(output, b"%d " % step)

run_dir = Path(sys.argv[1])
random.seed(3)
for life in range(30):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        live(run_dir, write)
    os.close(write)
    said = os.read(read, 1000)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(read, 1000):
        said += more
    os.close(read)

    loaded = load_checkpoint(run_dir)
    assert loaded.notes == [] and loaded.step >= int(said.split()[-1]), (said, loaded)
    tensors, moments, state = contents(loaded.step, size=100_000)
    assert loaded.state == state
    assert (loaded.tensors["w"] == tensors["w"]).all()
    assert (loaded.moments["v.w"] == moments["v.w"]).all()
    assert len(leftovers(run_dir)) <= 2 and len(steps(run_dir)) <= 4
print("survived", loaded.step)
"""


def test_thirty_kills_during_saves_lose_nothing_that_was_saved(tmp_path):
    """Each life resumes where the last was killed and saves as fast as it can; whatever it said
    was saved is there, whole, and no leftovers pile up."""
    (tmp_path / "checkpoints").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", LIVES, tmp_path],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    word, step = ended.stdout.split()
    assert word == "survived" and int(step) > 30
