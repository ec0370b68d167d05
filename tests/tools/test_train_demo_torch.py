"""The training model against reference data. Optional: runs where the extra `train` is installed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from tools.train_demo import weights  # noqa: E402
from tools.train_demo.model import forward  # noqa: E402
from tools.train_demo.tokens import build_tokenizer, save_tokenizer  # noqa: E402
from tools.train_demo.train import Trainer  # noqa: E402

ORACLE = Path(__file__).parents[1] / "data" / "oracle"


@pytest.mark.parametrize("case", ["tiny", "mtp", "long_kpool16"])
def test_logits_are_the_reference_s(case: str) -> None:
    g, w = weights.load(ORACLE / case)
    expected = load_file(ORACLE / case / "expected.safetensors")
    length = len(expected["input_ids"]) // g.pool * g.pool
    with torch.no_grad():
        result = forward(w, g, expected["input_ids"].long()[None, :length], torch.float32, sparse=True)

    def error(hidden, wanted):
        return float((hidden @ w["head"].T - wanted).abs().max() / wanted.abs().max())

    assert error(result.hidden, expected["logits"][:length]) < 5e-5
    if result.draft is not None:
        assert error(result.draft[: length - 1], expected["mtp.logits"]) < 1e-5


def test_a_checkpoint_read_and_written_is_the_same() -> None:
    g, w = weights.load(ORACLE / "mtp")
    tensors = load_file(ORACLE / "mtp" / "model.safetensors")
    written = weights.to_disk(g, w)
    assert {name: tensor.dtype for name, tensor in written.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def trainer(name: str) -> Trainer:
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        save_tokenizer(build_tokenizer(), out / "tokenizer.json")
        args = Namespace(out=out, seed=0, steps=6, tokens=512, longest=1024, workers=1, toy=True)
        return Trainer(args, torch.device("cpu"))

    def run(one: Trainer, steps: int) -> Trainer:
        for _ in range(steps):
            one.train_step()
        one.batches.close()
        return one

    whole = run(trainer("whole"), 4)
    run(trainer("parts"), 2).save()
    rest = trainer("parts")
    rest.resume()
    assert rest.step == 2
    run(rest, 2)
    assert all(torch.equal(tensor, rest.w[name]) for name, tensor in whole.w.items())
