"""Errors as users of the library meet them.

    DilocoError                 root: ``reason`` (stable code), ``message``, ``details``
      UsageError (ValueError)   the user's mistake: settings, arguments, the model

``learner.step`` raises only what ends the training of this process: FENCED (another process took
over the learner id) and refusals that no waiting heals, such as LAYOUT_MISMATCH after the run
behind the address was replaced. Whatever heals by itself is logged and counted instead.
"""

from __future__ import annotations

from decoupled_diloco.errors import DilocoError, Reason, UsageError

__all__ = ["DilocoError", "Reason", "UsageError"]
