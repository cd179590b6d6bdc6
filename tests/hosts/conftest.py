"""What the tests of hosts change in mlx-lm and mlx-vlm is put back."""

from collections.abc import Iterator

import pytest

import mlx_h2o
from mlx_h2o.hosts import routing


@pytest.fixture(autouse=True)
def routing_as_before() -> Iterator[None]:
    was_installed = routing.installed()
    yield
    mlx_h2o.uninstall()
    if was_installed:
        mlx_h2o.install()
