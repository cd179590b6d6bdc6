"""The one model that a server serves, loaded as by `mlx_h2o.load`."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
from mlx_lm.server import ModelProvider

from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.loading.load import load
from mlx_h2o.serve.sharing import is_own, load_shared, remember


class NotLoaded(ValueError):
    """The model cannot be loaded."""


class ServedModel(ModelProvider):  # type: ignore[misc]
    """mlx-lm's provider, for the command line's model alone: a request cannot name a path.

    Attributes:
        loaded: Set once the model is loaded, or cannot be.
        failure: Why it cannot be loaded, or None.
        measures: Whether a model without a profile is measured before any request is answered
            (`calibration/first_use.py`), so that none waits for it.
    """

    def __init__(self, cli_args: Any):
        super().__init__(cli_args)
        self.loaded = threading.Event()
        self.failure: Exception | None = None
        self.measures = False

    def load(
        self,
        model_path: str,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> tuple[Any, Any]:
        """The served model and its tokenizer, whatever name a request gives.

        Args:
            model_path: The name that the request gives.
            adapter_path: Passed by mlx-lm; unused.
            draft_model_path: Passed by mlx-lm; unused.
        """
        if self.model is None:
            try:
                self._load_served()
            except Exception as error:
                self.failure = error
                raise
            finally:
                self.loaded.set()
        return self.model, self.tokenizer

    def _load_served(self) -> None:
        own: Any = self  # mlx-lm's attributes begin as None
        args = self.cli_args
        if args.adapter_path is not None or (self.is_distributed and not is_own(args.model)):
            super().load("default_model", args.adapter_path, None)
            if self.is_distributed:
                remember(own.model, own.tokenizer, args.model)
        else:
            if self.tensor_group is not None:
                own.model, own.tokenizer = load_shared(args.model, self.tensor_group)
            else:
                own.model, own.tokenizer = load(args.model)
            own.model_key = (args.model, None, None)
            own.processor = own.draft_model = None
            if args.chat_template:
                own.tokenizer.chat_template = args.chat_template
        # Other threads make caches for it, and cannot evaluate arrays that are lazy in this one.
        mx.eval(own.model.parameters())
        own.is_batchable = all(hasattr(cache, "merge") for cache in stock_caches(own.model))
        if self.is_distributed and not own.is_batchable:
            raise ValueError(
                "Several processes share the model (mlx.launch), and its caches cannot be batched, "
                "which serving it together needs: run one process."
            )
        if self.measures:
            profile_at_load(own.model)

    def require(self) -> Any:
        """The model, once it is loaded.

        Raises:
            NotLoaded: The model could not be loaded.
        """
        self.loaded.wait()
        if self.failure is not None:
            raise NotLoaded(f"The model could not be loaded: {self.failure}")
        return self.model
