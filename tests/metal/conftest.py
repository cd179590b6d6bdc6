"""Every test here runs the Metal backend's launches on the host harness."""

import harness
import mlx.core as mx
import pytest
from launches import RecordingLauncher

from mlx_h2o.backends import metal

HOST = RecordingLauncher(harness.metal_kernel, "metal")


@pytest.fixture(autouse=True)
def host_launches(monkeypatch):
    """The Metal backend with the host in the place of a GPU."""
    monkeypatch.setattr(metal.GPU, "launcher", HOST)
    monkeypatch.setattr(metal.GPU, "architecture", lambda: "applegpu_g13g")
    mx.random.seed(0)


@pytest.fixture
def launched():
    """The variants that the tests of this session launched; whoever asks comes after them."""
    return list(HOST.launched)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "launched" in getattr(item, "fixturenames", ()))
