"""Files on web servers, by HTTP and HTTPS."""

import base64
import http.client
import netrc
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import Any

from flatout.data.transfer import Chunks, RemoteFile, SourceChanged, TransferError
from flatout.errors import InputError

# Silence that ends a connection.
_TIMEOUT_SECONDS = 20.0
_CHUNK_BYTES = 1 << 18
# What a URL may contain as it is; the rest is percent-encoded.
_SAFE = "%/:=&?~#+!$,;'@()*[]"
# `Repr-Digest` of RFC 9530, `Digest` of RFC 3230, and Google's `x-goog-hash`.
_PAGE_STARTS = (b"<!doctype html", b"<html")
_PAGE_BYTES = 256
_DIGEST_HEADERS = ("Repr-Digest", "Digest", "x-goog-hash")
_DIGEST = re.compile(r"\b(sha-256|md5)=:?([A-Za-z0-9+/]+=*)", re.IGNORECASE)


def web_file(url: str) -> RemoteFile:
    """Ask a web server about a file.

    Raises:
        InputError: the URL has a password or names no file, or the server is not there, refuses or sends a web page.
    """
    if urllib.parse.urlsplit(url).username is not None:
        raise InputError(
            f"{_shown(url)}: a password in a URL ends up in recipes and reports; put it into ~/.netrc "
            "(machine HOST login USER password PASSWORD) and remove it from the URL"
        )
    try:
        response = _open(url, "HEAD")
    except _Refused:
        # Some servers answer GET alone, and a signed URL is signed for one method.
        response = _open(url, "GET", Range="bytes=0-0")
    response.close()
    headers = response.headers
    if headers.get_content_type() == "text/html" and "Content-Type" in headers:
        raise _page(url)
    name = headers.get_filename() or urllib.parse.unquote(urllib.parse.urlsplit(url).path)
    name = re.sub(r"[\x00-\x1f]", "", re.split(r"[/\\]", name)[-1]).lstrip(".")
    if not name:
        raise TransferError(_shown(url), "names no file", "give the URL of a file; folders are read from s3, gs and hf")
    size, version = _size(headers), _version(headers)
    return RemoteFile(
        url=_shown(url),
        name=name,
        size=size,
        version=version,
        digest=_digest(headers),
        read=lambda start: read(url, start, (size, version)),
    )


def read(url: str, start: int = 0, expected: tuple[int | None, str] = (None, "")) -> tuple[int, Chunks]:
    """Return the first byte that a server sends, `start` or 0, and the chunks of bytes from there on.

    Raises:
        SourceChanged: the file has not the `expected` size and version, as far as these are known.
        TransferError: the server is not there, refuses, or (while reading) ends the connection early.
    """
    response = _open(url, "GET", **({"Range": f"bytes={start}-"} if start else {}))
    headers = response.headers
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        start = 0
    # What the server tells may differ between HEAD and GET, as long as it does not contradict itself.
    facts = zip((_size(headers), _version(headers)), expected, strict=True)
    is_other = any(found and wanted and found != wanted for found, wanted in facts)
    if is_other or (start and not headers.get("Content-Range", "").startswith(f"bytes {start}-")):
        response.close()
        raise SourceChanged(_shown(url))
    return start, _chunks(response, url, start)


def _chunks(response: http.client.HTTPResponse, url: str, start: int) -> Chunks:
    promised, received = int(response.headers.get("Content-Length") or 0), 0
    with response:
        try:
            while chunk := response.read1(_CHUNK_BYTES):
                if not start + received and chunk[:_PAGE_BYTES].lstrip().lower().startswith(_PAGE_STARTS):
                    raise _page(url)
                received += len(chunk)
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(
                _shown(url), f"{_reason(error)} after {start + received:,} bytes", "run the same command again"
            ) from None
    if received < promised:
        reason = f"cut off after {start + received:,} of {start + promised:,} bytes"
        raise TransferError(_shown(url), reason, "run the same command again")


def _page(url: str) -> TransferError:
    return TransferError(_shown(url), "is a web page, not data", "give the URL of the file itself")


class _Refused(TransferError):
    """The server has answered with an error status."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers; one of another origin does not get the credentials."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            request.method = req.get_method()  # a HEAD stays one
            if _origin(newurl) != _origin(req.full_url):
                request.remove_header("Authorization")
        return request


# Without the handlers of other schemes, to which a server could redirect.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
    _Redirects,
):
    _OPENER.add_handler(_handler())


def _open(url: str, method: str, **headers: str) -> http.client.HTTPResponse:
    from flatout import __version__

    request = urllib.request.Request(urllib.parse.quote(url, safe=_SAFE), headers=headers, method=method)
    request.add_header("User-Agent", f"flatout/{__version__}")
    if login := _login(urllib.parse.urlsplit(url).hostname or ""):
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        return _OPENER.open(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        other = "" if _origin(error.url) == _origin(url) else urllib.parse.urlsplit(error.url).netloc
        fix = (
            "check the URL; a user name and password go into ~/.netrc" if error.code in (401, 403) else "check the URL"
        )
        what = " ".join(f"{other or 'the server'} answers {error.code} {error.reason}".split())
        raise _Refused(_shown(url), what, fix) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TransferError(_shown(url), _reason(error), "check the URL and the network") from None


def _login(host: str) -> str:
    """Return USER:PASSWORD of a host in $NETRC or ~/.netrc; empty where there is none."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except FileNotFoundError:
        return ""
    except (OSError, netrc.NetrcParseError) as error:
        raise InputError(f"{os.environ.get('NETRC') or '~/.netrc'}: cannot be read: {error}") from None
    return f"{found[0]}:{found[2]}" if found else ""


def _origin(url: str) -> tuple[str, str]:
    return urllib.parse.urlsplit(url)[:2]


def _shown(url: str) -> str:
    """Return a URL for messages: without password and query, which may be a signature."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _reason(error: Exception) -> str:
    error = getattr(error, "reason", None) or error
    if isinstance(error, TimeoutError):
        return f"no answer for {_TIMEOUT_SECONDS:g} s"
    return str(error) or type(error).__name__


def _size(headers: Message) -> int | None:
    """Return the size of the whole file."""
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    return int(total) if total.isdecimal() else None


def _version(headers: Message) -> str:
    # A weak ETag does for what is stored: the server has it only where it might compress what it sends.
    return headers.get("ETag", "").removeprefix("W/") or headers.get("Last-Modified", "")


def _digest(headers: Message) -> tuple[str, str] | None:
    """Return the digest of the whole file, if the server gives one that hashlib knows."""
    given = [f"md5={headers['Content-MD5']}"] if "Content-MD5" in headers and "Content-Range" not in headers else []
    for header in _DIGEST_HEADERS:
        given += headers.get_all(header, [])
    # Google's servers may store files compressed, and the digest is of what they store.
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None
    found = {name.lower().replace("-", ""): text for name, text in _DIGEST.findall(" ".join(given))}
    for name in ("sha256", "md5"):
        if name in found:
            return name, base64.b64decode(found[name]).hex()
    return None
