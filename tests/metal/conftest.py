"""Every test here runs the Metal backend's launches on the host harness."""

import harness
import mlx.core as mx
import pytest

from mlx_h2o.backends import metal
from mlx_h2o.backends.launcher import Launcher

HOST = Launcher(harness.metal_kernel, "metal")


@pytest.fixture(autouse=True)
def host_launches(monkeypatch):
    """The Metal backend with the host in the place of a GPU."""
    monkeypatch.setattr(metal, "_LAUNCHER", HOST)
    monkeypatch.setattr(metal, "_architecture", lambda: "applegpu_g13g")
    mx.random.seed(0)
