"""Azure's blob storage on this machine: Azurite, Microsoft's emulator, if npm has installed it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from urllib.request import Request, urlopen

import pytest

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key that Microsoft publishes for the emulator."""
READY = "successfully listens on "


@contextmanager
def azurite() -> Iterator[str]:
    """Serve az:// until the block ends; yield the server's URL. Skip the test if Azurite is not installed."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs Azurite: npm install --global azurite")
    command = [program, "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]
    with subprocess.Popen([*command, "--disableTelemetry"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if READY in line)
            yield next(lines).partition(READY)[2].strip()
        finally:
            process.terminate()


def settings_for(server_url: str) -> dict[str, str]:
    """Return the environment in which az:// is a server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": server_url,
    }


def create_container(server_url: str, name: str) -> None:
    """Create a container by a request that is signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = f"PUT{chr(10) * 12}{lines}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{server_url}/{ACCOUNT}/{name}?restype=container"
    with urlopen(Request(url, method="PUT", headers=headers)) as answer:
        assert answer.status == 201
