"""Read objects of a store: S3, Google's and Azure's through obstore if it is installed, others by fsspec.

`ObjectFolder` also writes: it needs obstore, whose writes can depend on the version that is there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen
from xml.etree import ElementTree

from megalite.utils.errors import UserError, first_line
from megalite.utils.files import new_file


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of a store: s3://, gs://, memory://, ...; file:// is this machine."""
    return "://" in path and not path.startswith("file://")


def is_object_url(path: str | None) -> bool:
    """Return whether a path is a URL that can be written to: of S3, Google Cloud Storage or Azure's blobs."""
    return path is not None and path.startswith(("s3://", "gs://", "az://"))


def local_folder(path: str, stage: str | None) -> Path:
    """Return the folder of this machine for what belongs to a URL that can be written to, or the path itself.

    Its name has the endpoint or the account, since each has its own buckets.

    Args:
        stage: folder to put it in; by default the folder of temporary files.
    """
    if not is_object_url(path):
        return Path(path)
    name = quote(path.removeprefix("s3://").rstrip("/"), safe="")
    if (service := _service(path)) is not None:
        name += "@" + quote(service.rpartition("://")[2].rstrip("/"), safe=":")
    return Path(stage or tempfile.gettempdir()) / f"megalite-stage-{os.getuid()}" / name


class StoredObject(Protocol):
    """One version of an object of a store; several threads may read it at a time.

    Attributes:
        size: in bytes.
        version: the store's identifier of this version.
        store: what tells the store from others that have objects of the same URL.
    """

    size: int
    version: str
    store: str

    def read(self, begin: int, end: int) -> bytes:
        """Return these bytes; `FileNotFoundError` if the object was removed, or is known to be another."""
        ...

    def is_unchanged(self) -> bool:
        """Return whether all bytes read so far are of this version."""
        ...


def open_object(url: str) -> StoredObject:
    """Find an object and its version.

    Raises:
        FileNotFoundError: there is no such object.
        UserError: the store cannot be reached, or a package is missing.
    """
    obstore = _obstore_for(url)
    return _FsspecObject(url) if obstore is None else _ObstoreObject(obstore, url)


def read_object(url: str) -> bytes:
    """Return all bytes of a small object; see `open_object`."""
    found = open_object(url)
    return found.read(0, found.size) if found.size else b""


def object_exists(url: str) -> bool:
    """Return whether there is an object of this URL; see `open_object`."""
    try:
        open_object(url)
    except FileNotFoundError:
        return False
    return True


def find_objects(url: str) -> list[str]:
    """Return the URLs of the objects that a URL, a glob or the prefix of a folder name, sorted.

    Raises:
        UserError: the store cannot be listed, or a package is missing.
    """
    if not any(sign in url for sign in "*?["):
        if not url.endswith("/") and object_exists(url):
            return [url]
        url = f"{url.rstrip('/')}/**"
    scheme = url.partition("://")[0]
    if (obstore := _obstore_for(url)) is None:
        files, pattern = fsspec_store(url)
        with _named_errors(url):
            found = files.glob(pattern, detail=True)
        return sorted(f"{scheme}://{name}" for name, info in found.items() if info["type"] == "file")
    from fsspec.utils import glob_translate

    with _named_errors(url):
        store, pattern = _open_store(obstore, url)
        folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
        names = [each["path"] for chunk in obstore.list(store, folder or None) for each in chunk]
    is_match = re.compile(glob_translate(pattern)).match
    return sorted(f"{url.removesuffix(pattern)}{name}" for name in names if is_match(name))


def _obstore_for(url: str) -> Any:
    try:
        import obstore
    except ImportError:
        return None
    return obstore if is_object_url(url) else None


class _FsspecObject:
    """Object of a store that fsspec knows; credentials and options come from fsspec's own configuration."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._path = fsspec_store(url)
        self.store = f"{_service(url)} {self._files.storage_options}"
        with _named_errors(url):
            info = self._files.info(self._path)
        if info.get("type", "file") != "file":
            raise FileNotFoundError(url)
        if info.get("size") is None:
            raise UserError(f"cannot read {url}: it is not a file of known size")
        self.size = int(info["size"])
        self.version = self._find_version()

    def read(self, begin: int, end: int) -> bytes:
        with _named_errors(self._url):
            return bytes(self._files.cat_file(self._path, start=begin, end=end))

    def is_unchanged(self) -> bool:
        return self._find_version() == self.version

    def _find_version(self) -> str:
        self._files.invalidate_cache(self._path)  # cached listings contain versions too
        with _named_errors(self._url):
            return str(self._files.ukey(self._path))


class _ObstoreObject:
    """Object that obstore reads. Each request names the version, so that no other request asks for it.

    obstore repeats requests that time out or that the store refuses for its load (503).
    """

    def __init__(self, obstore: Any, url: str) -> None:
        self._url, self._obstore = url, obstore
        self.store = str(_service(url))
        with _named_errors(url):
            self._store, self._path = _open_store(obstore, url)
            found = self._call(obstore.head, self._store, self._path)
        self.size, self.version = int(found["size"]), str(found["e_tag"])

    def read(self, begin: int, end: int) -> bytes:
        options = {"range": (begin, end), "if_match": self.version}
        with _named_errors(self._url):
            return bytes(self._call(self._obstore.get, self._store, self._path, options=options).bytes())

    def is_unchanged(self) -> bool:
        return True

    def _call(self, call: Any, *args: Any, **options: Any) -> Any:
        exceptions = self._obstore.exceptions
        try:
            return call(*args, **options)
        except (FileNotFoundError, exceptions.NotFoundError, exceptions.PreconditionError):
            raise FileNotFoundError(self._url) from None


class ObjectInfo(NamedTuple):
    """Version of an object.

    Attributes:
        size: in bytes.
        version: the store's identifier of the content, or of the write.
        written: when the object was written, by the store's clock, which counts seconds.
    """

    size: int
    version: str
    written: str


class ObjectFolder:
    """Objects under a prefix of a store, to list, read, write and delete; names are relative to the prefix.

    A store has no folders: objects are independent, and an object is replaced as a whole. Requests that the
    store refuses for its load are repeated.

    Args:
        url: URL of the prefix, such as s3://bucket/run.

    Raises:
        UserError: the URL names no bucket, or obstore is not installed.
        OSError: a method cannot reach the store, or lacks a permission.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
        except ImportError:
            raise UserError(
                f"{url} needs a package that is not installed: pip install 'megalite[storage]'"
            ) from None
        self._scheme, _, path = url.partition("://")
        self._bucket, _, self._prefix = path.rstrip("/").partition("/")
        parts = {self._bucket, *self._prefix.split("/")} if self._prefix else {self._bucket}
        if not {"", ".", ".."}.isdisjoint(parts):
            raise UserError(
                f"{url} lacks a bucket, or has an empty part, . or ..: write {self._scheme}://BUCKET/FOLDER"
            )
        self.url = url.rstrip("/")
        self._obstore = obstore
        with _named_errors(url):
            self._store, _ = _open_store(obstore, url)

    def list_all(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each object under a folder's name."""
        with self._as_os_errors(folder):
            chunks = self._obstore.list(self._store, self._path(folder))
            return {self._name(each["path"]): int(each["size"]) for chunk in chunks for each in chunk}

    def list_top(self) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders, and the size in bytes of each object that is in none."""
        with self._as_os_errors(""):
            found = self._obstore.list_with_delimiter(self._store, self._prefix or None)
        folders = [self._name(path) for path in found["common_prefixes"]]
        return folders, {self._name(each["path"]): int(each["size"]) for each in found["objects"]}

    def read(self, name: str) -> bytes:
        """Return all bytes of an object; `FileNotFoundError` without it."""
        return self.read_version(name)[0]

    def read_version(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return all bytes of an object and their version; `FileNotFoundError` without it."""
        with self._as_os_errors(name):
            found = self._obstore.get(self._store, self._path(name))
            meta = found.meta
            info = ObjectInfo(int(meta["size"]), self._version_of(meta), str(meta["last_modified"]))
            return bytes(found.bytes()), info

    def read_part(self, name: str, begin: int, end: int) -> bytes:
        """Return these bytes of an object, which has them; `FileNotFoundError` without it."""
        with self._as_os_errors(name):
            return bytes(self._obstore.get_range(self._store, self._path(name), start=begin, end=end))

    def write(self, name: str, content: bytes, *, is_new: bool = False, replaces: str | None = None) -> str:
        """Write an object as a whole, and return its version.

        Args:
            is_new: raise `FileExistsError` if there is an object of this name.
            replaces: version to replace; raise `FileNotFoundError` if it is gone.
        """
        mode: Any = "create" if is_new else "overwrite"
        if replaces is not None:  # Google's conditions name the write, and others the content
            mode = {"version" if self._scheme == "gs" else "e_tag": replaces}
        with self._as_os_errors(name):
            put = self._obstore.put(self._store, self._path(name), content, mode=mode, use_multipart=False)
        return self._version_of(put)

    def upload(self, name: str, file: Path) -> None:
        """Write the content of a file, in parts of which 4 travel at a time."""
        part_bytes = max(_PART_BYTES, file.stat().st_size // _MAX_PARTS + 1)
        with self._as_os_errors(name):
            self._obstore.put(
                *(self._store, self._path(name), file), chunk_size=part_bytes, max_concurrency=_NUM_REQUESTS
            )

    def download(self, name: str, file: Path) -> str:
        """Write an object to a new file, and return its SHA-256 in hexadecimal digits.

        Parts of it travel at a time, since a request must end within half a minute.
        """
        digest, path = hashlib.sha256(), self._path(name)
        with self._as_os_errors(name):
            found = self._obstore.head(self._store, path)

            def read(begin: int) -> bytes:
                span = begin, min(begin + _PART_BYTES, found["size"])
                options = {"range": span, "if_match": found["e_tag"]}
                return bytes(self._obstore.get(self._store, path, options=options).bytes())

            with new_file(file) as target, ThreadPoolExecutor(_NUM_REQUESTS, "download") as pool:
                parts = deque[Future[bytes]]()
                begins = iter(range(0, found["size"], _PART_BYTES))
                parts.extend(pool.submit(read, begin) for begin in islice(begins, _NUM_REQUESTS))
                while parts:
                    part = parts.popleft().result()
                    parts.extend(pool.submit(read, begin) for begin in islice(begins, 1))
                    digest.update(part)
                    target.write(part)
        return digest.hexdigest()

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; one that is not there is no error."""
        paths = [self._path(name) for name in names]
        with self._as_os_errors(""):
            try:
                self._obstore.delete(self._store, paths)
            except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
                if self._scheme == "s3":  # the bucket is not there; other stores mean an object
                    raise
                for path in paths:
                    with suppress(FileNotFoundError, self._obstore.exceptions.NotFoundError):
                        self._obstore.delete(self._store, path)

    def abort_uploads(self, prefix: str) -> None:
        """Delete the invisible parts of objects of S3 whose name begins so and whose upload did not end.

        Azure deletes them after a week, and Google by a rule of the bucket's life cycle.

        Raises:
            OSError: also if the store cannot list uploads.
        """
        if self._scheme != "s3":
            return
        listing = f"uploads=&prefix={quote(self._path(prefix), safe='')}"
        for _ in range(_MAX_PAGES):
            try:
                page = ElementTree.fromstring(self._request("GET", "", listing))
            except ElementTree.ParseError:
                raise OSError(errno.EIO, "the store does not list uploads", self.url) from None
            for upload in page.findall("{*}Upload"):
                key, number = (upload.findtext(f"{{*}}{field}") or "" for field in ("Key", "UploadId"))
                self._request("DELETE", f"/{quote(key)}", f"uploadId={quote(number, safe='')}")
            if page.findtext("{*}IsTruncated") != "true":
                break

    def _request(self, method: Literal["GET", "DELETE"], path: str, query: str) -> bytes:
        """Send a request that obstore has no function for, signed by it.

        It signs URLs of objects. Here, the name of the object is the value of a last parameter, `x-id`, which
        stores ignore: AWS's own clients add it.

        Args:
            path: encoded path after the bucket.
        """
        with self._as_os_errors(""):
            lifetime = timedelta(minutes=5)
            base = self._obstore.sign(self._store, method, "x", lifetime).partition("?")[0][: -len("/x")]
            options = _s3_options() | {"virtual_hosted_style_request": True}
            options["endpoint"] = f"{base}{path}?{query}&x-id="
            options["client_options"] = {"allow_http": base.startswith("http://")}
            store = self._obstore.store.S3Store(self._bucket, **options)
            request = Request(self._obstore.sign(store, method, "x", lifetime), method=method)
        try:
            with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return b""
            raise OSError(errno.EIO, f"the store answers {error.code}", self.url) from None
        except HTTPException as error:
            raise OSError(errno.EIO, first_line(error), self.url) from None

    def _version_of(self, found: Mapping[str, Any]) -> str:
        return str(found["version" if self._scheme == "gs" else "e_tag"])

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def _name(self, path: str) -> str:
        return path.removeprefix(self._prefix).strip("/")

    @contextmanager
    def _as_os_errors(self, name: str) -> Iterator[None]:
        """Raise the errors of the store as those of a file system, with the URL as the file's name."""
        exceptions, url = self._obstore.exceptions, f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except exceptions.AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url) from None
        except (exceptions.NotFoundError, exceptions.PreconditionError, FileNotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, _reason(error, errno.ENOENT), url) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _reason(error, errno.EACCES), url) from None
        except exceptions.BaseError as error:
            raise OSError(errno.EIO, _reason(error), url) from None


_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000
_MAX_PAGES = 100
_TIMEOUT_SECONDS = 30.0
_NUM_REQUESTS = 4
"""Parts of an object that travel at a time."""


def _open_store(obstore: Any, url: str) -> tuple[Any, str]:
    """Return obstore's store of a bucket, with the credentials of the environment, and the path in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    stores = obstore.store
    if scheme == "s3":
        return stores.S3Store(bucket, **_s3_options()), path
    return (stores.GCSStore if scheme == "gs" else stores.AzureStore)(bucket), path


def _service(url: str) -> str | None:
    """Return what tells services apart that have the same URLs: an endpoint of S3, or an account of Azure."""
    of_s3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    of_azure = ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME")
    names = {"s3": of_s3, "az": of_azure}.get(url.partition("://")[0], ())
    return next(filter(None, map(os.environ.get, names)), None)


def _s3_options() -> dict[str, Any]:
    """Return what obstore does not find by itself: profiles of ~/.aws, and a plain-HTTP endpoint."""
    options: dict[str, Any] = {}
    if (endpoint := _service("s3://")) is not None:
        options["endpoint"] = endpoint
        options["client_options"] = {"allow_http": endpoint.startswith("http://")}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
        except (ImportError, ValueError):  # no boto3, or no profile: obstore looks for an instance's role
            pass
    return options


@contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """Raise the errors of a store's library, which has exceptions of its own, as one line."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:
        raise UserError(f"cannot read {url}: {_reason(error)}") from None


def _reason(error: Exception, number: int | None = None) -> str:
    """Return why a store refuses a request, in one line: the code and the text of its answer if it has one.

    Args:
        number: what the error means to a file system, if that is all that the usual answers say.
    """
    answer = re.search(r"<Code>(\w+)</Code>(?:\s*<Message>([^<\n]*))?", str(error))
    if answer and (number is None or answer[1] not in _USUAL_CODES):
        return ": ".join(part.strip(" .") for part in answer.groups() if part)
    if number is not None:
        return os.strerror(number)
    if status := re.search(r"status code: (\d+ [\w ]+)", str(error)):  # the answer to HEAD has no text
        hint = ": check credentials, permissions and this machine's clock" if "403" in status[1] else ""
        return f"the store answers {status[1].strip()}{hint}"
    return first_line(error)


_USUAL_CODES = ("NoSuchKey", "BlobNotFound", "PreconditionFailed", "ConditionNotMet", "AccessDenied")


def fsspec_store(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the path in it.

    Raises:
        UserError: fsspec or the store's own package is not installed, or the store is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        extra = "'megalite[storage]'" if url.startswith("s3://") else "fsspec"
        raise UserError(f"reading {url} needs a package that is not installed: pip install {extra}") from None
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the store's own package is missing, or the store is unknown
        hint = ": pip install obstore" if url.startswith("s3://") else ""
        raise UserError(f"cannot read {url}: {error}{hint}") from None
    return files, path
