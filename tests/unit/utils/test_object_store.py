"""Objects of a store that are listed, written on conditions, and deleted."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.utils import object_store
from megalite.utils.errors import UserError
from megalite.utils.object_store import ObjectFolder, find_objects, local_folder, open_object
from tests import azurite
from tests.object_server import ObjectServer, s3_in

pytest.importorskip("obstore")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with s3_in(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    with azurite.azurite() as url:
        yield url


@pytest.fixture(params=["s3", "gs", "az"])
def bucket(request: pytest.FixtureRequest, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket of each kind of store."""
    name = f"bucket-{uuid.uuid4()}"
    if request.param == "az":
        url = request.getfixturevalue("azure")
        for key, value in azurite.settings_for(url).items():
            monkeypatch.setenv(key, value)
        azurite.create_container(url, name)
    return f"{request.param}://{name}"


def test_names_are_relative_and_listings_have_all_pages(server: ObjectServer) -> None:
    folder = ObjectFolder("s3://b/run/")
    for number in range(250):
        server.objects[f"b/run/a/{number}"] = b"x" * number
    server.objects |= {"b/run/latest": b"1", "b/run/é & <b>/c": b"2", "b/runs/x": b"3", "b/y": b"4"}
    listed = folder.list_all("a")
    assert listed == {f"a/{i}": i for i in range(250)}
    folders, objects = folder.list_top()
    assert sorted(folders) == ["a", "é & <b>"]
    assert list(objects) == ["latest"]
    folder.delete(listed)
    assert server.objects.keys() == {"b/run/latest", "b/run/é & <b>/c", "b/runs/x", "b/y"}
    assert ObjectFolder("s3://b").list_top()[1].keys() == {"y"}


def test_a_write_depends_on_what_is_there(bucket: str) -> None:
    folder = ObjectFolder(f"{bucket}/run")
    first = folder.write("x", b"1", is_new=True)
    with pytest.raises(FileExistsError):
        folder.write("x", b"2", is_new=True)
    second = folder.write("x", b"3", replaces=first)
    with pytest.raises(FileNotFoundError):
        folder.write("x", b"4", replaces=first)
    content, info = folder.read_version("x")
    assert (content, info.version, info.size) == (b"3", second, 1)
    folder.delete(["x", "never"])
    with pytest.raises(FileNotFoundError):
        folder.write("x", b"5", replaces=second)
    with pytest.raises(FileNotFoundError) as error:
        folder.read("x")
    assert error.value.filename == f"{bucket}/run/x"


def test_every_store_lists_and_keeps_versions_apart(bucket: str) -> None:
    folder = ObjectFolder(f"{bucket}/run")
    for name in ("a/1", "a/2", "a b/é", "top"):
        folder.write(name, name.encode())
    assert folder.list_top() == (["a", "a b"], {"top": 3})
    assert folder.list_all("a") == {"a/1": 3, "a/2": 3}
    assert find_objects(f"{bucket}/run/a*/?") == [
        f"{bucket}/run/a b/é",
        f"{bucket}/run/a/1",
        f"{bucket}/run/a/2",
    ]
    opened = open_object(f"{bucket}/run/a/2")
    assert opened.read(1, 3) == folder.read_part("a/2", 1, 3) == b"/2"
    folder.write("a/2", b"new")
    with pytest.raises(FileNotFoundError):
        opened.read(0, 1)
    folder.abort_uploads("a")
    folder.delete(folder.list_all(""))
    assert folder.list_top() == ([], {})


@pytest.mark.parametrize("size", [0, 999, 1000, 2500])
def test_a_file_goes_up_in_parts_and_comes_down_with_its_digest(
    bucket: str, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 1000)
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "up").write_bytes(content)
    folder = ObjectFolder(f"{bucket}/run")
    folder.upload("a/x", tmp_path / "up")
    assert folder.read("a/x") == content
    assert folder.download("a/x", tmp_path / "down") == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "down").read_bytes() == content
    assert not server.parts


def test_errors_are_those_of_a_file_system(server: ObjectServer) -> None:
    folder = ObjectFolder("s3://b/run")
    server.is_read_only = True
    with pytest.raises(PermissionError) as error:
        folder.write("x", b"")
    assert error.value.filename == "s3://b/run/x"
    for url in ("s3://", "s3://b/a//c", "s3://b/../c", "s3://b/./c"):
        with pytest.raises(UserError, match=r"has an empty part, \. or \.\.: write s3://BUCKET/FOLDER"):
            ObjectFolder(url)


def test_an_error_says_what_the_store_says(server: ObjectServer) -> None:
    """As for a clock that is wrong, unless a file system says the same."""
    folder = ObjectFolder("s3://b/run")
    server.refusal = "RequestTimeTooSkewed"
    for call in (lambda: folder.read("x"), lambda: folder.write("x", b""), folder.list_top):
        with pytest.raises(OSError, match=r"\] RequestTimeTooSkewed: It says why: 's3://b/run"):
            call()
    with pytest.raises(UserError, match=r"s3://b/\*: RequestTimeTooSkewed: It says why$"):
        find_objects("s3://b/*")
    with pytest.raises(UserError, match=r"s3://b/x: the store answers 403 Forbidden: check .* clock$"):
        open_object("s3://b/x")
    server.refusal = "NoSuchBucket"
    for call in (lambda: folder.write("x", b""), lambda: folder.delete(["x"])):
        with pytest.raises(FileNotFoundError, match=r"NoSuchBucket: It says why"):
            call()
    server.refusal = "AccessDenied"
    with pytest.raises(PermissionError, match=r"Permission denied: 's3://b/run/x'"):
        folder.read("x")


def test_urls_have_folders_of_their_own_on_this_machine(tmp_path: Path, monkeypatch) -> None:
    """Also the buckets of each endpoint."""
    urls = ["s3://b/run", "s3://b/run/x", "s3://b/run_x", "s3://b/run%2Fx", "s3://b/..", "s3://b/run@c:1"]
    endpoints = ["", "http://c:1", "https://c:2/", "http://c:2/d"]
    folders = []
    for endpoint in endpoints:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        folders += [local_folder(url, str(tmp_path)) for url in urls]
    assert len({*folders}) == len(urls) * len(endpoints)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    assert len({folder.parent for folder in folders}) == 1
    assert local_folder("s3://b/run/", str(tmp_path)) == folders[0]
    assert local_folder("runs/a", str(tmp_path)) == Path("runs/a")
