"""The checksum of TensorFlow's files: CRC-32C, masked."""

from flatout.errors import InputError


def masked_crc32c(data: bytes, *, what: str, extra: str) -> bytes:
    """Return the checksum, 4 bytes, as TFRecord files and checkpoints have it.

    Raises:
        InputError: google-crc32c is not installed; `what` needs it, and `extra` installs it.
    """
    try:
        import google_crc32c
    except ImportError:
        raise InputError(
            f"{what} need the package google-crc32c for their checksums: pip install 'flatout[{extra}]'"
        ) from None
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
