"""The checkpoint writer: what it writes opens as a checkpoint, is the same each time, and its tokenizer keeps every byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoint import random_checkpoint
from tokenizers import Tokenizer

from latentpool.geometry import Geometry
from services.rank_worker.model.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]


def make(out, *options):
    command = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_same_arguments_give_the_same_checkpoint(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    for out in (once, again):
        assert make(out, "--preset", "demo")[0] == 0
    assert {file.name for file in once.iterdir()} == {file.name for file in again.iterdir()}
    geometry = Geometry.from_file(once)
    assert open_checkpoint(once, geometry).digest == open_checkpoint(again, geometry).digest


def test_shards_dtype_and_seed(tmp_path):
    assert make(tmp_path / "a", "--preset", "tiny", "--shards", "3", "--dtype", "f32")[0] == 0
    assert make(tmp_path / "b", "--preset", "tiny", "--seed", "1")[0] == 0
    sharded = open_checkpoint(tmp_path / "a", Geometry.from_file(tmp_path / "a"))
    assert len(sharded.files) == 3
    assert {tensor.dtype for tensor in sharded.tensors.values()} == {"F32"}
    other = open_checkpoint(tmp_path / "b", Geometry.from_file(tmp_path / "b"))
    assert {tensor.dtype for tensor in other.tensors.values()} == {"BF16", "F32"}
    assert sharded.digest != other.digest


@pytest.mark.parametrize("case", ["mtp", "shared_index"])
def test_any_geometry(tmp_path, case):
    """The table of names is the release's: reference configs give the names and shapes of the reference files."""
    config = json.loads((ROOT / "tests" / "data" / "oracle" / case / "config.json").read_text())
    config["text_config"]["vocab_size"] = 320
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = make(tmp_path / "out", "--config", str(tmp_path / "config.json"))
    assert code == 0, text
    written = open_checkpoint(tmp_path / "out", Geometry.from_file(tmp_path / "out")).tensors
    reference_dir = ROOT / "tests" / "data" / "oracle" / case
    reference = open_checkpoint(reference_dir, Geometry.from_file(reference_dir)).tensors
    assert written.keys() == reference.keys()
    own = {name: (t.dtype, t.shape) for name, t in written.items() if "embed" not in name and "lm_head" not in name}
    assert own == {name: (reference[name].dtype, reference[name].shape) for name in own}


def test_tokenizer_keeps_every_byte():
    made = random_checkpoint()
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    text = "hé\x00\r\n\t  世界 🙂" + "".join(chr(i) for i in range(256))
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    vocab = Geometry.from_file(made).vocab
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert tuple(ends) == Geometry.from_file(made).eos_ids
    assert tokenizer.token_to_id("</think>") == vocab - 1


def test_a_vocabulary_without_room_is_refused(tmp_path):
    code, text = make(tmp_path, "--config", str(ROOT / "tests" / "data" / "oracle" / "tiny" / "config.json"))
    assert code == 1
    assert "vocab_size 256 is less than 256 bytes + 9 special tokens" in text
