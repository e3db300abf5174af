"""A folder of a local or mounted file system.

Small files are written beside their target, synced, and appear by ``link`` (create-only) or
``rename`` (replace). Data files bypass the page cache where that works. Whatever a file system
cannot do is replaced by the next best, and a warning says what is not promised then.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from collections.abc import Callable

from waypost import limits
from waypost.clock import SYSTEM_CLOCK, Clock
from waypost.errors import CommitUnknownError
from waypost.storage import failures, posix
from waypost.storage.base import Lock, Name, ReadFile, WriteFile
from waypost.storage.localfiles import LocalReadFile, LocalWriteFile

_log = logging.getLogger("waypost")
_numbers = itertools.count()

_RETRIED = frozenset({errno.EACCES, errno.EBUSY, errno.ESTALE})
"""What network and Windows file systems are known to answer for a moment while a file is in use."""


class LocalStorage:
    """Files below ``root``; nothing outside it is touched.

    Args:
        root: The folder, which need not exist yet.
        clock: Used to wait between retries.
    """

    def __init__(self, root: str | os.PathLike[str], clock: Clock = SYSTEM_CLOCK) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._clock = clock

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    def url(self, path: str) -> str:
        """Returns the absolute path."""
        return os.path.join(self._root, *path.split("/")) if path else self._root

    def make_folder(self, path: str, *, durable: bool) -> None:
        """Makes the folder and its parents, and syncs the name of each from the root's on.

        A folder that is there already may not be durable yet: whoever made it may have been killed.
        """
        full = self.url(path)
        chain = [full]
        while not os.path.isdir(chain[-1]) and os.path.dirname(chain[-1]) != chain[-1]:
            chain.append(os.path.dirname(chain[-1]))
        while chain[-1] != self._root and chain[-1].startswith(self._root):
            chain.append(os.path.dirname(chain[-1]))
        for folder in reversed(chain):
            if not os.path.isdir(folder):
                self._make_one(folder)
            if durable and os.path.dirname(folder) != folder:
                self._sync_folder(os.path.dirname(folder))

    def _make_one(self, folder: str) -> None:
        def attempt() -> None:
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    if os.path.lexists(folder) and not os.path.isdir(folder):
                        raise
                    raise OSError(errno.ESTALE, "the folder is there and is not", folder) from None

        try:
            self._retry(attempt, frozenset({errno.ESTALE, errno.EEXIST}))
        except OSError as error:
            failures.fail(error, "make the folder", folder)

    def create(self, path: str, size_bytes: int, *, direct: bool) -> WriteFile:
        """Returns a new data file; it must not be there yet."""
        return LocalWriteFile(self.url(path), size_bytes, direct=direct)

    def settle(self, path: str) -> None:
        """Syncs the folder."""
        self._sync_folder(self.url(path))

    def publish(self, path: str, data: bytes, *, replace: bool, durable: bool) -> None:
        """Writes beside ``path``, syncs, then links or renames into place."""
        target = self.url(path)
        folder, base = os.path.split(target)
        scratch = os.path.join(folder, f".{base}.{os.getpid()}-{next(_numbers)}.tmp")
        try:
            posix.write_new(scratch, data, mode=_mode_of(target) if replace else None, sync=durable)
            if replace:
                self._retry(lambda: os.replace(scratch, target), _RETRIED)
            else:
                self._retry(lambda: posix.link_new(scratch, target), _RETRIED)
        except OSError as error:
            outcome = _outcome(scratch, target)
            _discard(scratch)
            if outcome is None:
                raise CommitUnknownError(
                    f"whether {target} was published is unknown ({error}); nothing was removed"
                ) from error
            if not outcome:
                failures.fail(
                    error, "publish", target, needed_bytes=len(data), free_bytes=self.free_bytes("")
                )
        except BaseException:
            _discard(scratch)
            raise
        _discard(scratch)
        if durable:
            self._sync_folder(folder)

    def open(self, path: str) -> ReadFile:
        """Opens the file; links below the root are refused."""
        return LocalReadFile(self._unlinked(path))

    def read(self, path: str, bytes_max: int) -> bytes:
        """Returns a small file's bytes."""
        with LocalReadFile(self._unlinked(path)) as file:
            buffer = bytearray(min(file.size_bytes, bytes_max + 1))
            return bytes(buffer[: file.read(0, [memoryview(buffer)])])

    def size(self, path: str) -> int | None:
        """Returns the size of a regular file."""
        try:
            found = os.stat(self.url(path), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            failures.fail(error, "look at", self.url(path))
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, path: str) -> list[Name]:
        """Returns the names in the folder; a link to a folder is not a folder."""
        full = self.url(path)
        try:
            with os.scandir(full) as entries:
                found = [
                    Name(entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in itertools.islice(entries, limits.LISTING_NAMES_MAX)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            failures.fail(error, "list", full)
        return sorted(found, key=lambda name: name.name)

    def remove(self, path: str) -> bool:
        """Removes a file or a link, never what a link points to."""
        full = self.url(path)
        try:
            self._retry(lambda: os.unlink(full), _RETRIED)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            failures.fail(error, "remove", full)
        return True

    def remove_folder(self, path: str) -> bool:
        """Removes a folder if it is empty."""
        full = self.url(path)
        try:
            os.rmdir(full)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            failures.fail(error, "remove the folder", full)
        return True

    def free_bytes(self, path: str) -> int | None:
        """Returns what the file system has left for this user."""
        full = self.url(path)
        while not os.path.exists(full) and os.path.dirname(full) != full:
            full = os.path.dirname(full)
        try:
            return posix.free_bytes(full)
        except OSError:
            return None

    def lock(self, path: str) -> Lock | None:
        """Takes the lock, which forked children do not keep."""
        try:
            return posix.lock(self.url(path))
        except OSError as error:
            failures.fail(error, "lock", self.url(path))

    def _unlinked(self, path: str) -> str:
        """Returns the full path, after making sure that no folder on the way is a link."""
        folder = self._root
        for piece in path.split("/")[:-1]:
            folder = os.path.join(folder, piece)
            if os.path.islink(folder):
                error = OSError(errno.ELOOP, "a link, which is not followed inside a snapshot")
                failures.fail(error, "open", folder)
        return self.url(path)

    def _sync_folder(self, folder: str) -> None:
        try:
            posix.sync_folder(folder)
        except PermissionError as error:
            _log.warning("%s: names are not synced to the medium: %s", folder, error)
        except OSError as error:
            failures.fail(error, "sync the folder", folder)

    def _retry(self, action: Callable[[], None], numbers: frozenset[int]) -> None:
        wait_s = limits.RETRY_WAIT_S
        for remaining in reversed(range(limits.RETRIES_MAX)):
            try:
                return action()
            except OSError as error:
                if error.errno not in numbers or not remaining:
                    raise
            self._clock.sleep(wait_s)
            wait_s *= 2


def _mode_of(target: str) -> int | None:
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except OSError:
        return None


def _outcome(scratch: str, target: str) -> bool | None:
    """Tells whether ``target`` is what was written to ``scratch``; None when that is unknown.

    A rename or link whose answer was lost may have happened: the same file under the other name is
    proof that it did; a scratch file that is there, and not linked, is proof that it did not.
    """
    try:
        ours = os.stat(scratch)
    except FileNotFoundError:
        return False if not os.path.lexists(target) else None
    except OSError:
        return None
    try:
        return os.path.samestat(ours, os.stat(target))
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _discard(scratch: str) -> None:
    try:
        os.unlink(scratch)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s is left behind: %s", scratch, error)
