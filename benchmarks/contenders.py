"""What is compared: each writes and reads the same dictionary of tensors.

``durable`` means that the data is on the medium when the call returns. Peers that do not sync by
themselves get an ``fsync`` of every file they wrote, timed with the save.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

State = dict[str, torch.Tensor]

_SEGMENT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to save and load.

    Attributes:
        name: As the report calls it.
        save: Writes a state into a new folder, durably or not.
        load: Fills existing tensors from that folder.
        is_limit: A bare limit of the machine, not a format.
    """

    name: str
    save: Callable[[Path, State, bool], None] | None
    load: Callable[[Path, State], None] | None
    is_limit: bool = False


def contenders() -> list[Contender]:
    """Returns all of them; a peer that is not installed is left out with a word on stderr."""
    found = [
        Contender("waypost", _waypost_save, _waypost_load),
        Contender("bare pwrite, direct, 1 thread", _bare(True, 1), None, is_limit=True),
        Contender("bare pwrite, direct, 2 threads", _bare(True, 2), None, is_limit=True),
        Contender("bare pwrite, buffered", _bare(False, 1), _bare_read(1), is_limit=True),
        Contender("bare pread, 2 threads", None, _bare_read(2), is_limit=True),
        Contender("torch.save", _torch_save, _torch_load),
        Contender("safetensors", _safetensors_save, _safetensors_load),
        Contender("torch DCP", _dcp_save, _dcp_load),
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchsnapshot  # noqa: F401
    except ImportError:
        print("torchsnapshot is not installed and is left out", flush=True)
    else:
        found.append(Contender("torchsnapshot", _torchsnapshot_save, _torchsnapshot_load))
    return found


def _waypost_save(folder: Path, state: State, durable: bool) -> None:
    import waypost

    options = waypost.Options(durable=durable, direct_io=None if durable else False)
    waypost.save(folder, {"model": state}, options=options)


def _waypost_load(folder: Path, state: State) -> None:
    import waypost

    waypost.load(folder, {"model": state})


def _bare(direct: bool, threads: int) -> Callable[[Path, State, bool], None]:
    """Writes the bytes of all tensors to one preallocated file, and nothing else."""

    def save(folder: Path, state: State, durable: bool) -> None:
        folder.mkdir(parents=True)
        use_direct = direct and durable
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if use_direct else 0)
        pieces, total = _pieces(state)
        descriptor = os.open(folder / "bare", flags, 0o666)
        if use_direct:
            os.posix_fallocate(descriptor, 0, total)
        _share(pieces, lambda: _writer(descriptor, use_direct), threads)
        if durable:
            os.fdatasync(descriptor)
        os.close(descriptor)

    return save


def _writer(descriptor: int, direct: bool) -> Callable[[int, np.ndarray], None]:
    memory = mmap.mmap(-1, _SEGMENT_BYTES) if direct else None

    def write(offset: int, data: np.ndarray) -> None:
        if memory is None:
            os.pwrite(descriptor, data, offset)
            return
        np.copyto(np.frombuffer(memory, np.uint8, len(data)), data)
        os.pwrite(descriptor, memoryview(memory)[: len(data)], offset)

    return write


def _bare_read(threads: int) -> Callable[[Path, State], None]:
    """Reads one file's bytes into all tensors, and nothing else."""

    def load(folder: Path, state: State) -> None:
        pieces, _ = _pieces(state)
        descriptor = os.open(folder / "bare", os.O_RDONLY)

        def reader() -> Callable[[int, np.ndarray], None]:
            return lambda offset, data: _read_all(descriptor, offset, data)

        _share(pieces, reader, threads)
        os.close(descriptor)

    return load


def _read_all(descriptor: int, offset: int, data: np.ndarray) -> None:
    done = 0
    while done < len(data):
        done += os.preadv(descriptor, [data[done:]], offset + done)


def _pieces(state: State) -> tuple[list[tuple[int, np.ndarray]], int]:
    pieces: list[tuple[int, np.ndarray]] = []
    position = 0
    for tensor in state.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), _SEGMENT_BYTES):
            pieces.append((position + start, data[start : start + _SEGMENT_BYTES]))
        position += len(data)
    return pieces, position


def _share(
    pieces: list[tuple[int, np.ndarray]],
    make: Callable[[], Callable[[int, np.ndarray], None]],
    threads: int,
) -> None:
    rest = iter(pieces)
    guard = threading.Lock()

    def work() -> None:
        act = make()
        while True:
            with guard:
                piece = next(rest, None)
            if piece is None:
                return
            act(*piece)

    team = [threading.Thread(target=work) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()


def _torch_save(folder: Path, state: State, durable: bool) -> None:
    folder.mkdir(parents=True)
    torch.save(state, folder / "state.pt")
    _sync(folder, durable)


def _torch_load(folder: Path, state: State) -> None:
    _copy(torch.load(folder / "state.pt", weights_only=True), state)


def _safetensors_save(folder: Path, state: State, durable: bool) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(state, folder / "state.safetensors")
    _sync(folder, durable)


def _safetensors_load(folder: Path, state: State) -> None:
    from safetensors.torch import load_file

    _copy(load_file(folder / "state.safetensors"), state)


def _dcp_save(folder: Path, state: State, durable: bool) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, sync_files=durable)
        dcp.save({"model": state}, storage_writer=writer, no_dist=True)


def _dcp_load(folder: Path, state: State) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def _torchsnapshot_save(folder: Path, state: State, durable: bool) -> None:
    import torchsnapshot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchsnapshot.Snapshot.take(str(folder), {"model": torchsnapshot.StateDict(**state)})
    _sync(folder, durable)


def _torchsnapshot_load(folder: Path, state: State) -> None:
    import torchsnapshot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        into = torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot(str(folder)).restore({"model": into})


def _copy(source: State, target: State) -> None:
    """Ends where every contender ends: in the tensors that exist already."""
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


def _sync(folder: Path, durable: bool) -> None:
    if not durable:
        return
    for place, _, names in os.walk(folder):
        for path in [*(Path(place) / name for name in names), Path(place)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
