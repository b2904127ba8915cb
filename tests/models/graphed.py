"""Models on the CUDA runner, with the stand-ins of ``test_graphs.py`` where there is no device."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.models.test_graphs import DEVICE, InTorch, Recorder

from foretoken.core.native.build import SWITCH
from foretoken.models.runners import choose
from foretoken.models.runners.cuda import layout
from foretoken.models.runners.cuda.runner import CudaRunner


@contextmanager
def on_graphs(recorder: type[Recorder] = Recorder) -> Iterator[list[Recorder]]:
    """Decoders and heads built inside are on the CUDA runner. Yields the objects that capture their graphs."""
    made: list[Recorder] = []

    def capture(device: Any) -> Recorder:
        made.append(recorder(device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        if DEVICE.type != "cuda":
            patch.setattr(choose, "has_kernels", lambda device: True)
            patch.setattr(layout, "attention_kernels", lambda: InTorch)
        patch.setattr(choose, "CudaRunner", partial(CudaRunner, capture=capture))
        yield made
