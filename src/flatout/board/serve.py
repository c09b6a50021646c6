"""Serving the board on this machine until Ctrl-C."""

import errno
import secrets
import socket
from pathlib import Path

from flatout.console import Console
from flatout.errors import InputError

PORT, PORTS_TRIED = 8420, 100
HOST = "127.0.0.1"
# How long requests may take when the server ends.
GRACE_SECONDS = 1


def serve(folder: Path, port: int | None, console: Console) -> None:
    """Show the runs below a folder on a port, or the next free one, until the process is interrupted.

    Raises:
        InputError: the folder is a file, no port is free, or the extra `board` is not installed.
    """
    try:
        import uvicorn

        from flatout.board.app import make_app
    except ModuleNotFoundError as error:
        raise InputError(f"board needs the package {error.name}: pip install 'flatout[board]'") from None
    from flatout.board.store import Store

    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give the folder that holds the runs")
    with _listen(PORT if port is None else port) as listening:
        free, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        if port not in (None, 0, free):
            console.note(f"port {port} is in use: using {free}")
        if not folder.is_dir():
            console.note(f"{folder} does not exist yet: runs are shown as soon as they appear")
        app = make_app(Store(folder), token, is_ending=lambda: server.should_exit)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, ws="none"
        )
        server = uvicorn.Server(config)
        console.note(f"the runs in {folder}: http://{HOST}:{free}/?token={token}")
        console.note("Ctrl-C ends the board")
        server.run(sockets=[listening])


def _listen(port: int) -> socket.socket:
    """Return a socket of this machine on a port, or on the next free one; 0 is any."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be from 0 to 65535")
    reason = "is in use"
    for number in range(port, min(port + PORTS_TRIED, 65536)):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((HOST, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise InputError(f"--port {number}: {error.strerror}") from None
            reason = "is in use" if error.errno == errno.EADDRINUSE else "needs more rights"
            continue
        return listening
    raise InputError(f"--port {port}: {reason}, and so are the next ports; choose another --port")
