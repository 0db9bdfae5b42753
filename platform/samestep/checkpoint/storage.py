"""Files of a run, on the local file system or an object store, through one small interface.

Names are relative, with "/" between parts. A write is whole or absent: locally a temporary file
is renamed into place after an fsync, and an object store shows an object only when it is closed.
Every error of the operating system or of Arrow leaves here as a `StorageError`.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import fs

from samestep.errors import StorageError

Names = list[str]  # inside the class `list` is a method

_SCHEMES = ("file", "s3", "gs", "gcs")
_TEMPORARY = ".tmp"
_ADVICE = {
    errno.ENOSPC: "free some space there, lower checkpoint.keep or choose another storage",
    errno.EDQUOT: "the quota is used up: free some space or choose another storage",
    errno.EACCES: "give this user the right to it or choose another storage",
    errno.EPERM: "give this user the right to it or choose another storage",
    errno.EROFS: "the file system is read-only: choose another storage",
    errno.ENOENT: "check that the path exists and is the same on every node",
    errno.EEXIST: "something else has that name: move it away or choose another storage",
    errno.ENOTDIR: "a part of the path is a file: move it away or choose another storage",
}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A folder of some storage; cheap, picklable, holds nothing open.

    Attributes:
        root: path inside the file system, without a slash at its end.
        filesystem: Arrow's file system; None is the local one, which is handled by the
            operating system's own calls because they can be atomic and durable.
        scheme: "file", "s3" and so on: what `uri` starts with.
        query: what the URI gave after "?" (an endpoint, a region), with the question mark.
    """

    root: str
    filesystem: Any = None
    scheme: str = "file"
    query: str = ""

    @classmethod
    def at(cls, uri_or_path: str) -> Storage:
        """Opens a local path (made absolute here), `file://`, `s3://` or `gs://`.

        Raises:
            StorageError: another scheme, or the store can't be reached.
        """
        scheme, separator, rest = uri_or_path.partition("://")
        if not separator:
            return cls(root=str(Path(uri_or_path).expanduser().resolve()))
        if scheme not in _SCHEMES:
            raise StorageError(
                f"storage {uri_or_path!r} has the scheme {scheme!r}; allowed are a local path, "
                f"{', '.join(f'{name}://' for name in _SCHEMES)}"
            )
        if scheme == "file":
            if not rest.startswith("/"):
                raise StorageError(
                    f"storage {uri_or_path!r} has no absolute path; write file:///folder"
                )
            return cls(root=str(Path(rest).resolve()))
        with _explained("open", uri_or_path):
            filesystem, root = fs.FileSystem.from_uri(uri_or_path)
        _, mark, options = rest.partition("?")
        return cls(
            root=root.rstrip("/"), filesystem=filesystem, scheme=scheme, query=mark + options
        )

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of the local file system (which may be a network mount)."""
        return self.filesystem is None

    @property
    def local_path(self) -> Path | None:
        """The folder as a path where storage is local, else None."""
        return Path(self.root) if self.is_local else None

    @property
    def uri(self) -> str:
        """What `at` opens again: a plain absolute path where local, else a URI."""
        return self.root if self.is_local else f"{self.scheme}://{self.root}{self.query}"

    @property
    def exclusive_is_best_effort(self) -> bool:
        """Whether `create_exclusive` can let two callers win a race (true of object stores)."""
        return not self.is_local

    def child(self, name: str) -> Storage:
        """The folder `name` inside this one; it need not exist."""
        return replace(self, root=self._path(name))

    def exists(self, name: str = "") -> bool:
        """Whether there is a file or a folder of that name."""
        path = self._path(name)
        with _explained("look at", path):
            if self.is_local:
                return os.path.lexists(path)
            return bool(self._info(path).type != fs.FileType.NotFound)

    def list(self, name: str = "") -> Names:
        """Sorted names of the direct children; empty where there is no such folder."""
        path = self._path(name)
        with _explained("list", path):
            if self.is_local:
                names = os.listdir(path) if os.path.lexists(path) else []
            else:
                selector = fs.FileSelector(path, allow_not_found=True)
                names = [info.base_name for info in self.filesystem.get_file_info(selector)]
        return sorted(child for child in names if not is_temporary(child))

    def walk(self, name: str) -> Names:
        """Sorted names, from this folder on, of all files below a folder; empty without one."""
        path = self._path(name)
        with _explained("list", path):
            if self.is_local:
                found = [str(file) for file in Path(path).rglob("*") if file.is_file()]
            else:
                found = self._files_below(path) if self.exists(name) else []
        names = (file.removeprefix(self.root).lstrip("/") for file in found)
        return sorted(file for file in names if not is_temporary(file.rpartition("/")[2]))

    def read(self, name: str) -> bytes:
        """The whole file."""
        path = self._path(name)
        with _explained("read", path):
            if self.is_local:
                return Path(path).read_bytes()
            with self.filesystem.open_input_stream(path) as stream:
                data: bytes = stream.read()
                return data

    def read_part(self, name: str, start_bytes: int, max_bytes: int) -> bytes:
        """What a file holds from `start_bytes` on, at most `max_bytes` of it."""
        path = self._path(name)
        with _explained("read", path):
            if self.is_local:
                with open(path, "rb") as file:
                    file.seek(start_bytes)
                    return file.read(max_bytes)
            with self.filesystem.open_input_file(path) as stream:
                stream.seek(start_bytes)
                data: bytes = stream.read(max_bytes)
                return data

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Makes or replaces a file, and its folders: afterwards it holds all of `data`.

        Who reads meanwhile sees the old content or the new one. Where local, the data is on
        disk when this returns.
        """
        self.write_chunks(name, [data])

    def write_chunks(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As `write`, for content that comes in parts, one after another."""
        path = self._path(name)
        with _explained("write", path):
            if not self.is_local:
                self._write_remote(path, chunks)
                return
            temporary = _write_temporary(path, chunks)
            try:
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
            _sync_folder(os.path.dirname(path))

    def append(self, name: str, data: bytes) -> None:
        """Adds to the end of a local file (made if need be) and hands it to the system at once.

        Raises:
            StorageError: storage is an object store; those can't append.
        """
        path = self._path(name)
        if not self.is_local:
            raise StorageError(f"can't append to {self.uri}/{name}: write a new object instead")
        with _explained("append to", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab") as file:
                file.write(data)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Makes a file that must not exist yet; False, and nothing changed, where it does.

        Where local, exactly one of several callers gets True and nobody ever sees a part of
        the data. Elsewhere see `exclusive_is_best_effort`.
        """
        path = self._path(name)
        with _explained("create", path):
            if not self.is_local:
                if self._info(path).type != fs.FileType.NotFound:
                    return False
                self._write_remote(path, [data])
                return True
            temporary = _write_temporary(path, [data])
            try:
                os.link(temporary, path)  # unlike O_EXCL: never visible without its content
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                return _create_without_links(path, data)
            finally:
                os.unlink(temporary)
            _sync_folder(os.path.dirname(path))
            return True

    def rename(self, source: str, target: str) -> None:
        """Moves a file or a folder; the target's parents are made. Not atomic on object stores."""
        old, new = self._path(source), self._path(target)
        with _explained("move", f"{old} to {new}"):
            if self.is_local:
                os.makedirs(os.path.dirname(new), exist_ok=True)
                os.rename(old, new)
                return
            for path in self._files_below(old):
                moved = new + path.removeprefix(old)
                self._make_parents(moved)
                self.filesystem.copy_file(path, moved)
            self._delete_remote(old)

    def delete(self, name: str) -> None:
        """Removes a file or a whole folder; nothing happens where there is none."""
        path = self._path(name)
        with _explained("delete", path):
            if not self.is_local:
                self._delete_remote(path)
            elif os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)

    def size_bytes(self, name: str = "") -> int:
        """Bytes of a file, or of all files below a folder."""
        path = self._path(name)
        with _explained("measure", path):
            if not self.is_local:
                return sum(self._info(file).size for file in self._files_below(path))
            if not os.path.isdir(path):
                return os.stat(path).st_size
            return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())

    def _path(self, name: str) -> str:
        parts = [part for part in name.split("/") if part]
        assert ".." not in parts, f"{name!r} leads out of {self.uri}"
        return "/".join([self.root, *parts])

    def _info(self, path: str) -> Any:
        return self.filesystem.get_file_info([path])[0]

    def _files_below(self, path: str) -> Names:
        info = self._info(path)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if info.type == fs.FileType.File:
            return [path]
        found = self.filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        return [info.path for info in found if info.type == fs.FileType.File]

    def _make_parents(self, path: str) -> None:
        if self.filesystem.type_name not in ("s3", "gcs"):  # those have no folders to make
            self.filesystem.create_dir(os.path.dirname(path), recursive=True)

    def _write_remote(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._make_parents(path)
        with self.filesystem.open_output_stream(path) as stream:
            for chunk in chunks:
                stream.write(chunk)

    def _delete_remote(self, path: str) -> None:
        kind = self._info(path).type
        if kind == fs.FileType.File:
            self.filesystem.delete_file(path)
        elif kind == fs.FileType.Directory:
            self.filesystem.delete_dir(path)


def is_temporary(name: str) -> bool:
    """Whether a file of that name is one that a write has not finished, or never will."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def _write_temporary(path: str, chunks: Iterable[bytes | memoryview]) -> str:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    return temporary


def _create_without_links(path: str, data: bytes) -> bool:
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems can't sync a folder
            raise
    finally:
        os.close(handle)


@contextmanager
def _explained(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else str(error) or type(error).__name__
        advice = _ADVICE.get(number or 0, "check that the storage is there and can be reached")
        raise StorageError(f"can't {action} {path}: {reason}; {advice}") from error
