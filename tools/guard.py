"""Starts a command that must not outlive the process that started it.

Owns: asking the kernel to kill this process when its parent is gone (Linux), then becoming the command. Must
not know: what the command is. Called by: the supervisor, which runs it by path under `python -I -S`, so it
imports the standard library only and costs a few milliseconds. Usage: guard.py PARENT_PID COMMAND [ARGUMENT
…]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Arm the death signal and exec the command; exits 125 when the parent is gone, 127 without a command."""
    parent = int(argv[0])
    if sys.platform.startswith("linux"):
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # it died between its fork and our prctl
            sys.exit(125)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"cannot start {argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
