"""Every test here runs the Metal backend's launches on the host harness.

With MLX_H2O_ON_GPU=1 they run on this machine's GPU instead, Apple's or NVIDIA's; tests of what
only the harness counts are skipped then.
"""

import os

import harness
import mlx.core as mx
import pytest
from launches import RecordingLauncher

from mlx_h2o.attention.backends.gpu import METAL

ON_GPU = os.environ.get("MLX_H2O_ON_GPU") == "1"
if not ON_GPU:
    HOST = RecordingLauncher(harness.metal_kernel, "metal")
elif mx.metal.is_available():
    HOST = RecordingLauncher(mx.fast.metal_kernel, "metal")
else:
    HOST = RecordingLauncher(mx.fast.cuda_kernel, "cuda")


def nothing_is_counted():
    """Stands where `harness.recorded` stands."""
    pytest.skip("only the host harness counts")


@pytest.fixture(autouse=True)
def host_launches(monkeypatch, request):
    """The Metal backend with the host in the place of a GPU."""
    if ON_GPU and not hasattr(request.module, "metal_kernel"):
        monkeypatch.setattr(request.module, "recorded", nothing_is_counted, raising=False)
    monkeypatch.setattr(METAL, "launcher", HOST)
    monkeypatch.setattr(METAL, "architecture", lambda: "applegpu_g13g")
    # These tests are checks themselves; test_self_check.py is about those of the backend.
    monkeypatch.setenv("MLX_H2O_VERIFY", "never")
    mx.random.seed(0)


@pytest.fixture
def launched():
    """The variants that the tests of this session launched; the test that asks comes after them."""
    return list(HOST.launched)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "launched" in getattr(item, "fixturenames", ()))
