"""The training model against reference data. Optional: runs where the extra `train` is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from tools.train_demo import weights  # noqa: E402
from tools.train_demo.model import forward  # noqa: E402

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
