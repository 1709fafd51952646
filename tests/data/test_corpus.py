"""Documents: what is found, in which order, how it is named, and what is refused."""

import contextlib
import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import grain
import numpy as np
import pytest

from dynajax.data import FileDocuments, MemoryDocuments, folder_documents, manifest_text, stdlib_documents
from dynajax.data.corpus import Documents
from dynajax.errors import DataError


@pytest.fixture(scope="module")
def stdlib() -> FileDocuments:
    return stdlib_documents()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "b.txt": b"second",
        "a/z.txt": b"latin-1: \xe9\xff",
        "a/y.md": "ü, UTF-8".encode(),
        "empty.txt": b"",
        ".hidden": b"secret",
        ".git/config": b"secret",
        "image.png": b"\x89PNG\0\0\0",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    return tmp_path


def refused(call) -> str:
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_stdlib_is_the_librarys_own_source_and_sorted(stdlib: FileDocuments):
    # Independent of the scan: every .py file, then the folders that do not count.
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    dropped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    expected = [
        path.as_posix()
        for path in found
        if not dropped.intersection(path.parts[:-1])
        and not path.parts[0].startswith("config-")
        and not path.name.startswith("_sysconfigdata_")
        and path.name not in ("sitecustomize.py", "usercustomize.py")
    ]
    assert list(stdlib.paths) == sorted(expected)
    assert {"json/decoder.py", "asyncio/events.py", "argparse.py"} <= set(stdlib.paths)
    assert not [path for path in stdlib.paths if "test" in Path(path).parts or "tests" in Path(path).parts]
    assert len(stdlib) > 300
    assert stdlib.lengths.sum() > 5_000_000


def test_stdlib_documents_are_the_files_byte_for_byte(stdlib: FileDocuments):
    for index in range(0, len(stdlib), 50):
        text = (stdlib.root / stdlib.paths[index]).read_bytes()
        assert stdlib[index].tobytes() == text
        assert stdlib.lengths[index] == len(text)
        assert stdlib.read(index, len(text) // 3, len(text) // 2).tobytes() == text[len(text) // 3 : len(text) // 2]


def test_stdlib_manifest_and_digest(stdlib: FileDocuments):
    record = stdlib.manifest[stdlib.paths.index("json/decoder.py")]
    text = (stdlib.root / "json/decoder.py").read_bytes()
    assert record.size == len(text)
    assert record.sha256 == hashlib.sha256(text).hexdigest()
    assert len(manifest_text(stdlib.manifest).splitlines()) == len(stdlib)
    assert stdlib.digest == stdlib_documents().digest
    assert stdlib.digest == hashlib.sha256(manifest_text(stdlib.manifest).encode()).hexdigest()


def test_folder_documents(folder: Path):
    documents = folder_documents(folder)
    assert documents.paths == ("a/y.md", "a/z.txt", "b.txt", "empty.txt")
    assert documents.left_out == ("image.png",)
    assert [documents[i].tobytes() for i in range(4)] == ["ü, UTF-8".encode(), b"latin-1: \xe9\xff", b"second", b""]
    assert documents.lengths.tolist() == [9, 11, 6, 0]
    assert documents[1].dtype == np.uint8


def test_links_to_files_are_followed_and_links_to_folders_are_not(folder: Path):
    (folder / "link.txt").symlink_to(folder / "b.txt")
    (folder / "loop").symlink_to(folder)
    documents = folder_documents(folder)
    assert documents.paths == ("a/y.md", "a/z.txt", "b.txt", "empty.txt", "link.txt")
    assert documents[4].tobytes() == b"second"


def test_documents_are_random_access_sources(stdlib: FileDocuments):
    for documents in (stdlib, MemoryDocuments.of([b"a"])):
        assert isinstance(documents, grain.sources.RandomAccessDataSource)
        assert isinstance(documents, Documents)


def test_memory_documents():
    documents = MemoryDocuments.of([b"\xff\0", "ü", ""])
    assert documents.lengths.tolist() == [2, 2, 0]
    assert [documents[i].tobytes() for i in range(3)] == [b"\xff\0", "ü".encode(), b""]
    assert documents.read(0, 1, 2).tobytes() == b"\0"
    assert documents.digest == MemoryDocuments.of([b"\xff\0", "ü", ""]).digest
    assert documents.digest != MemoryDocuments.of(["ü", b"\xff\0", ""]).digest


def test_digest_follows_names_and_bytes_and_not_the_place(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    digest = folder_documents(folder).digest
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    folder.rename(elsewhere)
    assert folder_documents(elsewhere).digest == digest
    (elsewhere / "b.txt").write_bytes(b"sECOND")
    changed = folder_documents(elsewhere).digest
    (elsewhere / "b.txt").write_bytes(b"second")
    (elsewhere / "b.txt").rename(elsewhere / "c.txt")
    renamed = folder_documents(elsewhere).digest
    assert len({digest, changed, renamed}) == 3


def test_a_missing_folder_a_file_and_an_empty_folder_are_refused(tmp_path: Path):
    assert "No such file" in refused(lambda: folder_documents(tmp_path / "missing"))
    assert "give a folder" in refused(lambda: folder_documents(tmp_path))
    (tmp_path / "data.bin").write_bytes(b"\0\1")
    assert "only 1 binary files" in refused(lambda: folder_documents(tmp_path))
    (tmp_path / "empty.txt").touch()
    assert "no text" in refused(lambda: folder_documents(tmp_path))
    assert "not a folder" in refused(lambda: folder_documents(tmp_path / "empty.txt"))


def test_a_broken_link_is_named(folder: Path):
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    assert "broken.txt" in refused(lambda: folder_documents(folder))


@contextlib.contextmanager
def as_plain_user():
    """Root reads everything; take an unprivileged user id for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_may_not_be_read_is_named():
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        (root / "good.txt").write_bytes(b"text")
        (root / "closed").mkdir()
        (root / "closed" / "inner").mkdir()
        (root / "secret.txt").write_bytes(b"text")
        (root / "closed").chmod(0)
        with as_plain_user():
            assert "closed" in refused(lambda: folder_documents(root))
            assert "closed" in refused(lambda: folder_documents(root / "closed" / "inner"))
        (root / "closed").chmod(0o755)
        (root / "secret.txt").chmod(0)
        with as_plain_user():
            assert "secret.txt" in refused(lambda: folder_documents(root))
        documents = FileDocuments(root, ("secret.txt",), np.array([4]))
        with as_plain_user():
            assert "secret.txt" in refused(lambda: documents[0])
            assert "secret.txt" in refused(lambda: documents.manifest)


def test_a_file_that_changes_after_the_scan_is_named(folder: Path):
    documents = folder_documents(folder)
    (folder / "b.txt").write_bytes(b"cut")
    assert "b.txt" in refused(lambda: documents[2])
    assert "had 6 bytes and now has 3" in refused(lambda: documents.digest)
    (folder / "b.txt").unlink()
    assert "b.txt" in refused(lambda: documents[2])
