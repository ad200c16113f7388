"""The line of a command that ended with an error, for people."""

import re
import signal
import sys

from lean_finetune.core.errors import one_line

ERROR = re.compile("^error: (.*)$", re.MULTILINE)


def fault_of(code: int, errors: str) -> str:
    """Why a command ended with this code, by what it wrote to standard error."""
    found = ERROR.search(errors)
    if found:
        return one_line(found[1])
    if sys.platform != "win32" and code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "the command used more time or memory than it may have, and was ended"
    return f"the command ended with code {code}: {one_line(errors[-300:]) or 'it said nothing'}"
