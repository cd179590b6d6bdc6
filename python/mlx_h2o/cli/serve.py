"""`mlx_h2o serve`: an OpenAI-compatible server, within one hard bound for KV memory."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_h2o import _checks
from mlx_h2o._byte_size import Share, memory_size
from mlx_h2o._files import require_folder
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    add_reading_option,
    cache_options,
    cache_settings,
    memory,
    settle_model,
    typed,
)
from mlx_h2o.cli.sessions import days
from mlx_h2o.loading.gguf import SUFFIX
from mlx_h2o.loading.load import model_path, require_model

#: Tokens of a conversation where no size is given.
DEFAULT_SIZE = 1024
#: The environment variable of the key, since other users can see a process's arguments.
KEY_VARIABLE = "MLX_H2O_API_KEY"


def add_parser(commands: Any) -> None:
    """Add `serve` to the command's subparsers."""
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server within one bound for all KV memory",
        description="An OpenAI-compatible server (/v1/chat/completions, /v1/completions) with "
        "bounded caches, continuous batching and re-use of prefixes, and a page to chat. A request "
        'may bring its own settings in the extra field "mlx_h2o", as {"mlx_h2o": {"max_size": 512, '
        '"policy": "h2o"}}; what cannot be honoured is refused with the reason.',
    )
    add_model_option(parser, several=True)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--alias", action="append", default=[], metavar="NAME[=MODEL]",
        help="another name by which requests may call a model (the first), such as gpt-4o; may be "
        "repeated",
    )  # fmt: skip
    server.add_argument(
        "--kv-memory", dest="bound", type=typed(memory, "bytes such as 2GB, or a share"),
        metavar="SIZE", help="hard bound for all KV memory, of conversations, prefixes and "
        "batches: bytes, or 25%% of what a 16-bit cache takes at --context; requests wait until "
        "theirs is free (default: none)",
    )  # fmt: skip
    server.add_argument(
        "--memory", type=typed(size_in_bytes, "bytes such as 24GB"), metavar="SIZE",
        help="bytes of --kv-memory and of the loaded models' weights; a model that no request "
        "uses makes room for another (default, with several models: three quarters of the "
        "machine's)",
    )  # fmt: skip
    server.add_argument(
        "--queue", type=int, default=32, metavar="N",
        help="requests that may wait; more get 429 (default: %(default)s)",
    )  # fmt: skip
    server.add_argument(
        "--sessions", type=Path, metavar="DIR",
        help="save conversations there, to continue after a restart or when memory was short",
    )  # fmt: skip
    server.add_argument(
        "--sessions-memory", type=typed(size_in_bytes, "bytes such as 2GB"), metavar="SIZE",
        help="bytes that the files there may take; the oldest conversations go first "
        "(default: 10GB)",
    )  # fmt: skip
    server.add_argument(
        "--sessions-days", type=typed(days, "a number of days such as 30"), metavar="DAYS",
        help="remove conversations that had no turn for so long (default: 30)",
    )  # fmt: skip
    server.add_argument(
        "--long-prompts", action="store_true",
        help="serve prompts longer than those on which the model was trained (default: 400)",
    )  # fmt: skip
    _add_access_options(server)
    add_cache_options(parser, DEFAULT_SIZE, many=True)
    add_reading_option(server)
    server.add_argument(
        "--pin-role", action="append", default=[], metavar="ROLE",
        help="never evict what this role says, such as system, where a request names no pins",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_access_options(server: argparse._ArgumentGroup) -> None:
    """Add the options of the address and of who may ask."""
    server.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default: %(default)s, which other machines cannot reach)",
    )  # fmt: skip
    server.add_argument(
        "--port", type=int, default=8080, help="port (default: %(default)s; 0: any that is free)"
    )
    server.add_argument(
        "--api-key", metavar="KEY",
        help=f"a key that every request needs, but for /health (default: ${KEY_VARIABLE}, if set)",
    )  # fmt: skip
    server.add_argument(
        "--allowed-origins", default="", metavar="URLS",
        help="web pages that may ask, separated by commas; * is all (default: our own)",
    )  # fmt: skip
    server.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate, for HTTPS")
    server.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key")


def size_in_bytes(text: str) -> int:
    """A size in bytes, such as "2GB".

    Raises:
        ValueError: The text is no size, or a share.
    """
    size = memory_size("a size", memory(text))
    if isinstance(size, Share):
        raise ValueError(text)
    return size


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    try:
        from mlx_h2o.serve.launch import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11", "pydantic", "prometheus_client"):
            raise
        raise ValueError(
            "the server needs more packages: pip install starlette uvicorn pydantic "
            "prometheus-client"
        ) from error
    check_options(args)
    logging.basicConfig(format="%(asctime)s %(levelname)s: %(message)s")
    serve(settings_of(args))
    # Everything is written and every client gone. MLX's threads may still be releasing Python
    # objects, and one that does so while the interpreter ends aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def settings_of(args: argparse.Namespace) -> Any:
    """The server's settings that the options describe.

    Raises:
        ValueError: They are invalid; the message names the option.
    """
    from mlx_h2o.serve.access import AccessRules
    from mlx_h2o.serve.launch import ServerSettings
    from mlx_h2o.serve.listening import Certificate
    from mlx_h2o.serve.pins import PinRequest
    from mlx_h2o.serve.sessions import DEFAULT_BYTES, DEFAULT_DAYS, Limits
    from mlx_h2o.serve.settings import EngineSettings

    models = model_names(args)
    defaults = cache_defaults(args)
    measures = defaults.get("max_bytes") is not None and defaults.get("profile") != "never"
    engine = EngineSettings(
        models=models,
        defaults=defaults,
        measures=measures,
        pins=PinRequest(tuple(args.pin_role), required=False),
        bound=None if args.bound is None else memory_size("--kv-memory", args.bound),
        memory=args.memory,
        queue=args.queue,
        sessions=args.sessions,
        limits=Limits(args.sessions_memory or DEFAULT_BYTES, args.sessions_days or DEFAULT_DAYS),
        long_prompts=args.long_prompts,
        reading=args.reading,
    )
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError("--api-key must be ASCII text without spaces around it.")
    origins = [one.strip() for one in args.allowed_origins.split(",") if one.strip()]
    return ServerSettings(
        engine, args.host, args.port, aliases(args.alias, models), AccessRules(key, origins),
        certificate=Certificate(args.tls_cert, args.tls_key) if args.tls_cert else None,
    )  # fmt: skip


def model_names(args: argparse.Namespace) -> tuple[str, ...]:
    """The models that the options name, each once; the default if they name none.

    Raises:
        ValueError: There is no such model.
    """
    settled = settle_model(args)
    names = tuple(dict.fromkeys([settled] if isinstance(settled, str) else settled))
    for name in names:
        path = model_path(name)
        if not path.endswith(SUFFIX):
            require_model(name, path)
    return names


def aliases(texts: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Models by the further names that --alias gives them.

    Args:
        texts: Each "NAME", of the first model, or "NAME=MODEL".
        models: The names of all models.

    Raises:
        ValueError: There is no such model.
    """
    named = {}
    for text in texts:
        name, _, model = text.partition("=")
        named[name] = model or models[0]
        if named[name] not in models:
            raise ValueError(f"--alias {text}: there is no --model {model}.")
    return named


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for values that would fail only while the server starts, or later."""
    _checks.whole("--queue", args.queue, 0)
    _checks.whole("--port", args.port, 0, 2**16 - 1)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together: give both.")
    for option, path in (("--tls-cert", args.tls_cert), ("--tls-key", args.tls_key)):
        if path is not None and not path.is_file():
            raise ValueError(f"{option}: there is no file {path}.")
    if args.sessions is not None:
        if not args.sessions.exists():  # readable by its owner only
            args.sessions.mkdir(mode=0o700, parents=True)
        require_folder("--sessions", args.sessions)
    elif args.sessions_memory is not None or args.sessions_days is not None:
        option = "--sessions-days" if args.sessions_memory is None else "--sessions-memory"
        raise ValueError(f"{option} is about the folder of --sessions DIR: give that too.")
    cache_defaults(args)


def cache_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of caches that the options describe, as `make_prompt_cache` takes them.

    Raises:
        ValueError: The settings are invalid.
    """
    cache_settings(args)  # checks them
    return cache_options(args)
