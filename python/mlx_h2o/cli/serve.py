"""`mlx_h2o serve`: mlx-lm's OpenAI-compatible server, within one hard bound for KV memory."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o._utils.byte_size import Share, memory_size
from mlx_h2o._utils.files import require_folder
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    cache_settings,
    keeps_remainder,
    memory,
    policy_settings,
    settle_model,
    typed,
)
from mlx_h2o.cli.pin_options import add_pin_options
from mlx_h2o.cli.sessions import days
from mlx_h2o.loading.gguf import SUFFIX
from mlx_h2o.loading.load import model_path, require_model
from mlx_h2o.storage.pins import joined

DEFAULT_MAX_KV_SIZE = 1024
#: The environment variable of the key, since other users can see a process's arguments.
KEY_VARIABLE = "MLX_H2O_API_KEY"
#: Options of mlx-lm's server that are passed on unchanged.
MLX_LMS: dict[str, str] = {
    "host": "address to listen on (default: 127.0.0.1, which other machines cannot reach)",
    "port": "port (default: 8080; 0: any that is free)",
    "max-tokens": "tokens of an answer, where the request does not say (default: 512)",
    "temp": "temperature, where the request does not say (default: 0)",
    "top-p": "top-p, where the request does not say (default: 1)",
    "top-k": "top-k, where the request does not say (default: 0, which is off)",
    "min-p": "min-p, where the request does not say (default: 0)",
    "decode-concurrency": "requests that are answered at the same time (default: 32)",
    "prompt-concurrency": "prompts that are read at the same time (default: 8)",
    "prefill-step-size": "prompt tokens read at a time (default: 2048)",
    "prompt-cache-size": "idle caches to keep, where there is no --kv-memory (default: 10)",
    "adapter-path": "trained adapters of the model",
    "chat-template": "another chat template",
    "chat-template-args": "arguments of the chat template, as JSON",
    "log-level": "DEBUG, INFO, WARNING, ERROR or CRITICAL (default: WARNING)",
}


#: The smallest and largest values of those that are whole numbers.
LIMITS = {
    "port": (0, 2**16 - 1),
    "max-tokens": (1, checks.MOST_TOKENS),
    "top-k": (0, checks.MOST_TOKENS),
    "decode-concurrency": (1, 2**16),
    "prompt-concurrency": (1, 2**16),
    "prefill-step-size": (1, checks.MOST_TOKENS),
    "prompt-cache-size": (0, 2**16),
}


def json_object(text: str) -> str:
    """A JSON object, as text.

    Raises:
        ValueError: The text is something else.
    """
    if not isinstance(json.loads(text), dict):
        raise ValueError(text)
    return text


#: The types of those that are not texts.
TYPES: dict[str, dict[str, Any]] = {
    "temp": {"type": float},
    "top-p": {"type": float},
    "min-p": {"type": float},
    "chat-template-args": {"type": typed(json_object, 'a JSON object such as {"a": true}')},
    "log-level": {"choices": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")},
    **{name: {"type": int} for name in LIMITS},
}


def add_parser(commands: Any) -> None:
    """Add `serve` to the command's subparsers."""
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server within one bound for all KV memory",
        description="mlx-lm's server (/v1/chat/completions, /v1/completions) with bounded caches, "
        "continuous batching and re-use of prefixes. A request may bring its own settings in the "
        'extra field "mlx_h2o", as {"mlx_h2o": {"max_size": 512, "policy": "h2o"}}; what '
        "cannot be honoured is refused with the reason.",
    )
    add_model_option(parser)
    server = parser.add_argument_group("server")
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
        "(default: no bound)",
    )  # fmt: skip
    server.add_argument(
        "--sessions-days", type=typed(days, "a number of days such as 30"), metavar="DAYS",
        help="remove conversations that had no turn for so long (default: never)",
    )  # fmt: skip
    _add_doors(server)
    for name, text in MLX_LMS.items():
        metavar = name.rpartition("-")[2].upper()
        server.add_argument(f"--{name}", metavar=metavar, help=text, **TYPES.get(name, {}))
    add_cache_options(parser, DEFAULT_MAX_KV_SIZE, many=True)
    add_pin_options(parser)
    parser.set_defaults(run=run)


def _add_doors(server: argparse._ArgumentGroup) -> None:
    """Add the options of access and its limits."""
    server.add_argument(
        "--max-request", type=typed(size_in_bytes, "bytes such as 8MB"), default=8 << 20,
        metavar="SIZE", help="largest body of a request (default: 8 MiB)",
    )  # fmt: skip
    server.add_argument(
        "--allowed-origins", default="", metavar="URLS",
        help="web pages that may ask, separated by commas; * is all (default: our own)",
    )  # fmt: skip
    server.add_argument(
        "--max-connections", type=int, default=512, metavar="N",
        help="clients that may be connected at one time (default: %(default)s)",
    )  # fmt: skip
    server.add_argument(
        "--strict", action="store_true",
        help="refuse requests with fields that are not known (default: a warning and a header)",
    )  # fmt: skip
    server.add_argument(
        "--api-key", metavar="KEY",
        help=f"a key that every request needs, but for /health (default: ${KEY_VARIABLE}, if set)",
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
        from mlx_h2o.serve.app import Doors
        from mlx_h2o.serve.asked_pins import AskedPins
        from mlx_h2o.serve.listening import Certificate, Limits
        from mlx_h2o.serve.running import ServerSettings, serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11"):
            raise
        raise ValueError(f"{error.name} is missing: pip install 'mlx-h2o[server]'") from error

    check_options(args)
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError("--api-key must be ASCII text without spaces around it.")
    if args.sessions is not None:
        if not args.sessions.exists():  # readable by its owner only
            args.sessions.mkdir(mode=0o700, parents=True)
        require_folder("--sessions", args.sessions)
    elif args.sessions_memory is not None or args.sessions_days is not None:
        given = "--sessions-days" if args.sessions_memory is None else "--sessions-memory"
        raise ValueError(f"{given} is about the folder of --sessions DIR: give that too.")
    path = model_path(settle_model(args))
    if not path.endswith(SUFFIX):
        require_model(args.model, path)
    words = (tuple(args.pin_role), tuple(args.pin), tuple(args.pin_pattern))
    pins = AskedPins(*words, joined(args.pin_span), required=False)
    settings = ServerSettings(
        cache_defaults(args), args.bound, args.queue, args.sessions, pins,
        args.sessions_memory, args.sessions_days,
        doors=Doors(args.max_request, strict=args.strict, key=key),
        limits=Limits(args.max_connections),
        certificate=Certificate(args.tls_cert, args.tls_key) if args.tls_cert else None,
    )  # fmt: skip
    options = ["--model", args.model, "--allowed-origins", args.allowed_origins]
    for name in MLX_LMS:
        given = getattr(args, name.replace("-", "_"))
        if given is None and name == "log-level":
            given = "WARNING"
        if given is not None:
            options += [f"--{name}", str(given)]
    serve(settings, options)
    # Everything is written and every client gone. MLX's threads may still be releasing Python
    # objects, and one that does so while the interpreter ends aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for values that would fail only while the server starts, or later."""
    checks.whole("--queue", args.queue, 0)
    checks.whole("--max-connections", args.max_connections, 1, 2**16)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together: give both.")
    for name, limits in LIMITS.items():
        given = getattr(args, name.replace("-", "_"))
        if given is not None:
            checks.whole(f"--{name}", given, *limits)
    for name in ("top_p", "min_p"):
        given = getattr(args, name)
        if given is not None and not 0 <= given <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1; got {given:g}.")
    if args.temp is not None and not 0 <= args.temp <= checks.MOST_NUMBER:
        raise ValueError(f"--temp must be a number of at least 0; got {args.temp:g}.")
    if args.adapter_path is not None and not Path(args.adapter_path).is_dir():
        raise ValueError(f"--adapter-path: there is no folder {args.adapter_path}.")
    cache_defaults(args)


def cache_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of caches that the options describe, as `make_prompt_cache` takes them.

    Raises:
        ValueError: The settings are invalid.
    """
    cache_settings(args, DEFAULT_MAX_KV_SIZE)  # checks the settings, and chooses a size
    given = {
        "max_size": args.max_kv_size,
        "max_bytes": args.conversation_memory,
        "context": args.context,
        "policy": args.policy,
        "remainder": keeps_remainder(args),
        "positions": args.positions,
        "budgets": args.budgets,
        "bits": args.kv_bits,
        "k_bits": args.k_bits,
        "v_bits": args.v_bits,
        "group_size": args.kv_group_size,
        "recent_bits": args.recent_bits,
        "undo": args.undo,
        "profile": args.profile,
        "spill": args.spill,
        **policy_settings(args),
    }
    return {name: value for name, value in given.items() if value is not None}
