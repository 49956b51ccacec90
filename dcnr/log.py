"""Log lines of the long-running processes: structlog, to stderr, for people or as JSON.

What a process or task is about (`pnode`, `session`) is bound once with `structlog.contextvars.bind_contextvars`
and stands in every later line.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure(form: LogFormat = "console", level: LogLevel = "info") -> None:
    """Set up logging for this process; called once, by its entry point."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(form),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _renderers(form: LogFormat) -> list[structlog.typing.Processor]:
    if form == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
