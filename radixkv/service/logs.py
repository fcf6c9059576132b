"""Log lines of the service: as text or as JSON, each with its time and level; and the access log.

    2026-01-31T09:00:05.120Z WARNING radixkv.service: a restart is needed for the new values of: port
    {"time": "2026-01-31T09:00:05.120Z", "level": "warning", "logger": "radixkv.service", "message": "a restart …"}

The **access log** (``--access-log all``) has a line for each answered request, once its last byte is sent or its client
is gone: the method and the endpoint's own path, never the client's text; the request's id; the beginning of its key and
its tenant; status, bytes and seconds. Nothing of a prompt, an answer, a header or a query is in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

LogFormat = Literal["text", "json"]

ACCESS: Final = logging.getLogger("radixkv.access")
"""Lines of answered requests. Without ``set_up`` it writes nothing."""
ACCESS.disabled = True

_FIELDS: Final = "radixkv_fields"


def set_up(level: str, form: LogFormat, has_access: bool) -> None:
    """Send all log lines of this process to standard error, in this form. Call it once, at the start.

    ``level``: of all lines but those of the access log, which depend on ``has_access`` alone.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    ACCESS.disabled = not has_access
    ACCESS.setLevel(logging.INFO)


def log_access(fields: Mapping[str, str | int | float | None]) -> None:
    """Write a line of the access log. Fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    text = " ".join(f"{name}={_word(value)}" for name, value in known.items())
    ACCESS.info("%s", text, extra={_FIELDS: known})


def _word(value: str | int | float) -> str:
    """Return a value without spaces as it is, any other text in quotes, such as a tenant's id with a space."""
    text = str(value)
    return json.dumps(text) if set(text) & set(' "=') else text


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextLines(logging.Formatter):
    """Time, level, logger and message in a line; a traceback follows in lines of its own.

    Line breaks and other control characters of a message are written as escapes, so that no text makes two lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        message = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode()
            for each in record.getMessage()
        )
        line = f"{_time_of(record)} {record.levelname} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """A JSON object a line: ``time``, ``level``, ``logger``, ``message``, and ``exception`` with a traceback.

    A line of the access log has its fields in place of ``message``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= getattr(record, _FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
