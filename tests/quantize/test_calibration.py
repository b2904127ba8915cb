"""Text that runs through a model while it is quantized: its losses are the models', and GPTQ lowers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.tiny import ARCHITECTURES, only_runner
from torch import Tensor

from foretoken import zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.loading import load_model
from foretoken.quantize import calibration, quantize_checkpoint
from foretoken.quantize.calibration import Calibration, Losses
from foretoken.quantize.rounding import Rounding
from foretoken.quantize.schemes import Scheme
from foretoken.quantize.source import EMBEDDING, SourceCheckpoint


def tokens(count: int = 640) -> Tensor:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(0))


def run_through(source: SourceCheckpoint, text: Calibration, scale: float = 1.0) -> Losses:
    """Takes a text through a model whose layers' matrices are multiplied by ``scale`` instead of quantized."""
    ends: dict[str, Tensor] = {}
    for layer, tensors in source.parts():
        if layer is None:
            ends |= tensors
            if EMBEDDING in tensors:
                text.begin(tensors[EMBEDDING], tensors[EMBEDDING])
        else:
            curvatures = text.curvatures(layer, tensors)
            assert set(curvatures) == {name for name, tensor in tensors.items() if tensor.ndim == 2}
            assert all(len(curvatures[name].order) == tensors[name].shape[1] for name in curvatures)
            text.advance(layer, {n: t * scale if t.ndim == 2 else t for n, t in tensors.items()})
    return text.losses(ends, ends)


DENSE = [name for name, tiny in ARCHITECTURES.items() if tiny.native and tiny.torch and not tiny.mixture]


@pytest.mark.parametrize("family", DENSE)
def test_the_losses_are_those_of_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 40)
    path = ARCHITECTURES[family].save(tmp_path)
    source = SourceCheckpoint.open(path, Scheme.of("int4"))
    text = Calibration(Architecture.of(load_config(path)), tokens())
    losses = run_through(source, text)
    windows = tokens().view(-1, 40)[1::8]
    total = 0.0
    with only_runner("torch"):
        model = load_model(path, "float32")
        for window in windows.tolist():
            handle = model.open(window[:1])
            logits = model.score([handle], [Draft.chain(window[1:])])[0].logits[:-1]
            model.close(handle)
            total += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
    assert losses.tokens == windows[:, 1:].numel()
    assert losses.before == pytest.approx(total / losses.tokens, rel=1e-4)
    assert losses.after == pytest.approx(losses.before, rel=1e-5)
    assert run_through(source, Calibration(Architecture.of(load_config(path)), tokens()), 0.7).after != losses.after


def test_models_with_experts_are_refused(tmp_path: Path) -> None:
    path = ARCHITECTURES["mixtral"].save(tmp_path)
    with pytest.raises(InvalidRequest, match="experts are not calibrated"):
        Calibration(Architecture.of(load_config(path)), tokens())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g128", "Q4_0"])
def test_calibration_lowers_the_loss(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(file.read_text() for file in sorted(Path(calibration.__file__).parents[1].glob("c*/*.py")))[
        :30_000
    ]
    out = tmp_path / ("model.gguf" if scheme == "Q4_0" else "folder")
    calibrated = quantize_checkpoint(zoo.path("draft"), out, scheme, calibration=text)
    monkeypatch.setattr("foretoken.quantize.run.Rounding", lambda curvature=None: Rounding())
    nearest = quantize_checkpoint(zoo.path("draft"), out, scheme, calibration=text, force=True)
    assert calibrated.losses is not None and nearest.losses is not None
    assert calibrated.losses.before == nearest.losses.before
    assert calibrated.losses.after - calibrated.losses.before < 0.7 * (nearest.losses.after - nearest.losses.before)


def test_short_texts_and_schemes_that_round_nothing_are_refused(tmp_path: Path) -> None:
    source = zoo.path("draft")
    with pytest.raises(InvalidRequest, match="at least 32"):
        quantize_checkpoint(source, tmp_path / "q", "int4", calibration="def f(): pass")
    with pytest.raises(InvalidRequest, match="rounds no weights"):
        quantize_checkpoint(source, tmp_path / "q", "bfloat16", calibration="def f(): pass")
    with pytest.raises(InvalidRequest, match="only decoders"):
        quantize_checkpoint(zoo.path("eagle3"), tmp_path / "q", "int4", calibration="def f(): pass")
    assert not (tmp_path / "q").exists()
