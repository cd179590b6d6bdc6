"""`mlx_h2o serve`: an OpenAI-compatible server, within one hard bound for KV memory."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from mlx_h2o import _checks
from mlx_h2o._byte_size import Share, memory_size
from mlx_h2o._files import require_folder
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    cache_options,
    cache_settings,
    memory,
    settle_model,
    typed,
)
from mlx_h2o.cli.sessions import days
from mlx_h2o.loading.gguf import SUFFIX
from mlx_h2o.loading.load import model_path, require_model

DEFAULT_MAX_KV_SIZE = 1024
#: The environment variable of the key, since other users can see a process's arguments.
KEY_VARIABLE = "MLX_H2O_API_KEY"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


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
    add_model_option(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--alias", action="append", default=[], metavar="NAME",
        help="another name by which requests may call the model, such as gpt-4o; may be repeated",
    )  # fmt: skip
    server.add_argument(
        "--kv-memory", dest="bound", type=typed(size_in_bytes, "bytes such as 2GB"),
        metavar="SIZE", help="hard bound for the KV memory of all conversations, prefixes and "
        "batches; requests wait until theirs is free (default: none)",
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
    _add_generation_options(server)
    _add_access_options(server)
    server.add_argument(
        "--log-level", choices=LOG_LEVELS, default="WARNING", help="(default: %(default)s)"
    )
    add_cache_options(parser, DEFAULT_MAX_KV_SIZE, many=True)
    pins = parser.add_argument_group("pins")
    pins.add_argument(
        "--pin-role", action="append", default=[], metavar="ROLE",
        help="never evict what this role says, such as system, where a request names no pins",
    )  # fmt: skip
    pins.add_argument(
        "--pin", action="append", default=[], metavar="TEXT",
        help="never evict this text, where a request names no pins; may be repeated",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_generation_options(server: argparse._ArgumentGroup) -> None:
    """Add the options of prompts and answers."""
    server.add_argument(
        "--max-tokens", type=int, default=512, metavar="N",
        help="tokens of an answer, where the request does not say; -1: as many as the model gives "
        "(default: %(default)s)",
    )  # fmt: skip
    server.add_argument(
        "--temp", type=float, default=0.0, metavar="T",
        help="temperature, where the request does not say (default: 0)",
    )  # fmt: skip
    server.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="top-p, where the request does not say (default: 1)",
    )  # fmt: skip
    server.add_argument(
        "--long-prompts", action="store_true",
        help="serve prompts longer than those on which the model was trained (default: 400)",
    )  # fmt: skip
    server.add_argument(
        "--prefill-step-size", type=int, default=512, metavar="N",
        help="prompt tokens read at a time, between tokens of others (default: %(default)s)",
    )  # fmt: skip
    server.add_argument("--adapter-path", metavar="DIR", help="trained adapters of the model")
    server.add_argument("--chat-template", metavar="TEXT", help="another chat template")


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
        if error.name not in ("starlette", "uvicorn", "h11", "pydantic"):
            raise
        raise ValueError(
            "the server needs more packages: pip install starlette uvicorn pydantic "
            "prometheus-client"
        ) from error
    check_options(args)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s: %(message)s")
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
    from mlx_h2o.serve.model import ModelChoice
    from mlx_h2o.serve.pins import PinRequest
    from mlx_h2o.serve.sampling import SamplingDefaults
    from mlx_h2o.serve.scheduler import EngineSettings
    from mlx_h2o.serve.sessions import DEFAULT_BYTES, DEFAULT_DAYS, Limits

    path = model_path(settle_model(args))
    if not path.endswith(SUFFIX):
        require_model(args.model, path)
    defaults = cache_defaults(args)
    measures = defaults.get("max_bytes") is not None and defaults.get("profile") != "never"
    engine = EngineSettings(
        model=ModelChoice(args.model, args.adapter_path, args.chat_template, measures),
        defaults=defaults,
        sampling=SamplingDefaults(args.max_tokens, args.temp, args.top_p),
        pins=PinRequest(tuple(args.pin_role), tuple(args.pin), required=False),
        bound=args.bound,
        queue=args.queue,
        chunk=args.prefill_step_size,
        sessions=args.sessions,
        limits=Limits(args.sessions_memory or DEFAULT_BYTES, args.sessions_days or DEFAULT_DAYS),
        long_prompts=args.long_prompts,
    )
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError("--api-key must be ASCII text without spaces around it.")
    origins = [one.strip() for one in args.allowed_origins.split(",") if one.strip()]
    return ServerSettings(
        engine, args.host, args.port, tuple(args.alias), AccessRules(key, origins),
        certificate=Certificate(args.tls_cert, args.tls_key) if args.tls_cert else None,
    )  # fmt: skip


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for values that would fail only while the server starts, or later."""
    _checks.whole("--queue", args.queue, 0)
    _checks.whole("--port", args.port, 0, 2**16 - 1)
    if args.max_tokens != -1:
        _checks.whole("--max-tokens", args.max_tokens, 1)
    _checks.whole("--prefill-step-size", args.prefill_step_size, 1)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together: give both.")
    if not 0 <= args.top_p <= 1:
        raise ValueError(f"--top-p must be from 0 to 1; got {args.top_p:g}.")
    if not 0 <= args.temp <= _checks.MOST_NUMBER:
        raise ValueError(f"--temp must be a number of at least 0; got {args.temp:g}.")
    if args.adapter_path is not None and not Path(args.adapter_path).is_dir():
        raise ValueError(f"--adapter-path: there is no folder {args.adapter_path}.")
    if args.sessions is not None:
        if not args.sessions.exists():  # readable by its owner only
            args.sessions.mkdir(mode=0o700, parents=True)
        require_folder("--sessions", args.sessions)
    elif args.sessions_memory is not None or args.sessions_days is not None:
        given = "--sessions-days" if args.sessions_memory is None else "--sessions-memory"
        raise ValueError(f"{given} is about the folder of --sessions DIR: give that too.")
    cache_defaults(args)


def cache_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of caches that the options describe, as `make_prompt_cache` takes them.

    Raises:
        ValueError: The settings are invalid.
    """
    cache_settings(args, DEFAULT_MAX_KV_SIZE)  # checks them
    return cache_options(args, DEFAULT_MAX_KV_SIZE)
