"""Structured logs: one event per line, as text for people or JSON for machines.

Libraries only ever call ``logging.getLogger(__name__)`` and put facts into ``extra``; the entry
points of the processes call ``configure_logging`` once.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")
"""The formats of ``--log-format``."""

_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """The facts that were logged with ``extra=``, in the order given."""
    return {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, tz=UTC)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, process, message, the extra fields.

    An extra field never replaces one of ours. A traceback goes into ``exception``.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        fields: dict[str, object] = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # First for the order of the keys, last so that ours win.
        return json.dumps(fields | extra_fields(record) | fields, default=str)


class TextFormatter(logging.Formatter):
    """``12:34:56.789 I process message key=value ...`` in UTC; a traceback follows on own lines."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        clock = _time_of(record).strftime("%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{clock} {record.levelname[:1]} {self._process} {message}"
        for key, value in extra_fields(record).items():
            text = str(value)
            quoted = not text or any(c.isspace() or c in '"=' for c in text)
            line += f" {key}={json.dumps(text, ensure_ascii=False) if quoted else text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(
    *,
    log_format: LogFormat = "text",
    level: int | str = logging.INFO,
    process: str,
    stream: TextIO | None = None,
) -> None:
    """Sends all logs of this process to a stream; for entry points only.

    Args:
        log_format: "text" or "json".
        level: lowest level that is shown.
        process: name of this process in every line, for example "learner-0".
        stream: where the lines go; stderr where None.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=True)


class ChangeLogger:
    """Logs why a subject waits, once per change (design section 7).

    A loop may say its reason as often as it likes; a line appears only when the reason differs
    from the last one of that subject.

    Args:
        logger: where the lines go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._reasons: dict[str, str] = {}

    def log(
        self,
        subject: str,
        reason: str,
        detail: str = "",
        *,
        level: int = logging.INFO,
        **fields: object,
    ) -> bool:
        """Logs ``subject: reason: detail`` if the reason is another one than before.

        Args:
            subject: what waits, for example "round 17".
            reason: short stable word; it alone decides whether something changed.
            detail: the sentence for people.
            level: level of the line.
            **fields: extra fields of the line.

        Returns:
            Whether a line was logged.
        """
        if self._reasons.get(subject) == reason:
            return False
        self._reasons[subject] = reason
        text = f"{subject}: {reason}" + (f": {detail}" if detail else "")
        self._logger.log(level, "%s", text, extra={"subject": subject, "reason": reason, **fields})
        return True

    def reason(self, subject: str) -> str | None:
        """The reason last said for a subject; None where there is none."""
        return self._reasons.get(subject)

    def forget(self, subject: str) -> None:
        """Drops a subject that no longer waits, without a line; its next reason is news again."""
        self._reasons.pop(subject, None)
