"""Files that a command is going to make: what cannot be made is refused before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.spec.problems import BadInput, Problem


def check_new_file(option: str, target: Path) -> None:
    """Refuse a file that is there already or cannot be made.

    Args:
        option: Where it was named, for the message.
        target: The file.

    Raises:
        BadInput: naming option and file.
    """
    reason = fix = ""
    try:
        if target.exists() or target.is_symlink():
            reason, fix = "exists", "name a new file"
        elif not target.parent.is_dir():
            reason, fix = f"there is no folder {target.parent}", "make it first"
        elif not os.access(target.parent, os.W_OK | os.X_OK):
            reason, fix = f"nothing can be written into {target.parent}", "name another folder"
    except OSError as error:
        reason, fix = f"cannot be a file ({error.strerror})", "name another"
    if reason:
        raise BadInput(Problem(field=option, value=str(target), reason=reason, fix=fix))
