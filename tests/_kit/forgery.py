"""Snapshots with a lie in them and every digest right: what only checks of meaning can refuse."""

import base64
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from _kit.children import Outcome, in_child

Change = Callable[[Any], Any]
HEADROOM_BYTES = 768 << 20
SECONDS_MAX = 8


def _hex(content: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


class Forgery:
    """The documents of one snapshot on disk, to be changed and signed again."""

    def __init__(self, snapshot: str | Path) -> None:
        self.root = Path(snapshot)
        self.manifest: Any = json.loads((self.root / "manifest.json").read_bytes())
        self.structure: Any = json.loads(self._path("structure").read_bytes())
        self._index_record = self.manifest["indexes"][0]
        self.index: Any = json.loads(self._path("index").read_bytes())

    def _record(self, which: str) -> Any:
        return self.manifest["structure"] if which == "structure" else self._index_record

    def _path(self, which: str) -> Path:
        return self.root / self._record(which)["path"]

    @property
    def data(self) -> Path:
        """The directory of the data files."""
        return self._path("index").parent

    def write(self, which: str, content: bytes) -> None:
        """Puts bytes in place of the structure or the index; the manifest knows their digest."""
        self._path(which).write_bytes(content)
        self._record(which).update(bytes=len(content), digest=_hex(content))

    def sign_file(self, number: int) -> None:
        """The index gets the digests of the data file as it is now."""
        record = self.index["files"][number]
        content = (self.data / record["name"]).read_bytes()
        start, chunk = record["data_start"], self.index["chunk_bytes"]
        header = xxhash.xxh3_128_digest(content[:start])
        body = content[start:]
        chunks = b"".join(
            xxhash.xxh3_128_digest(body[at : at + chunk]) for at in range(0, len(body), chunk)
        )
        record["bytes"] = len(content)
        record["header"] = f"xxh3-128:{header.hex()}"
        record["chunks"] = base64.b64encode(chunks).decode()
        record["digest"] = _hex(header + chunks)

    def sign(self, *, documents: bool = True) -> None:
        """Writes all documents; each digest is that of what is written."""
        if documents:
            for which in ("structure", "index"):
                document = getattr(self, which)
                self.write(which, json.dumps(document, separators=(",", ":")).encode())
        self.write_manifest(self.manifest)

    def write_manifest(self, document: Any, also: str = "") -> None:
        """Writes the manifest with its own digest, which covers every byte before it."""
        content = {key: value for key, value in document.items() if key != "digest"}
        body = json.dumps(content, indent=1, ensure_ascii=False)[:-2]
        signed = body.replace("{\n", "{\n" + also, 1).encode()
        text = signed + f',\n "digest": "{_hex(signed)}"\n}}\n'.encode()
        (self.root / "manifest.json").write_bytes(text)


def header_of(file: Path) -> dict[str, Any]:
    """The safetensors header of the file."""
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def replace_header(file: Path, header: bytes, *, length: int | None = None) -> None:
    """Puts another header in front of the same data; its length field may lie."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    padded = header.ljust(size)
    claimed = len(padded) if length is None else length
    file.write_bytes(claimed.to_bytes(8, "little") + padded + content[8 + size :])


def bounded(action: Callable[[], Any], seconds: int = SECONDS_MAX) -> Outcome:
    """Runs the action in a child that may not take more memory, nor more than some seconds."""

    def limited() -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + HEADROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        return action()

    return in_child(limited)
