"""Whether the Hugging Face hub can be reached, and what of it is on this machine."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from normlab.utils.lazy import import_optional


def is_reachable() -> bool:
    """Whether it is worth asking the hub: its library would try for half a minute where there is no network."""
    constants = _library("constants")
    if constants.HF_HUB_OFFLINE:
        return False
    address = urlparse(constants.ENDPOINT)
    if address.scheme in urllib.request.getproxies():
        return True
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=3.0):
            return True
    except OSError:
        return False


def cached_file(name: str, file: str) -> Path | None:
    """A file of the id `name` that was downloaded before; None without one, and for what is no id."""
    try:
        found = _library("file_download").try_to_load_from_cache(name, file)
    except _library("errors").HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _library(part: str) -> Any:
    # By the module's name: the package imports its parts on demand, and not all of them.
    return import_optional(f"huggingface_hub.{part}", "hf", "a Hugging Face id")
