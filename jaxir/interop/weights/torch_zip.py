"""Files of torch.save since torch 1.6: a zip archive of a pickle and of plain numbers.

`NAME/data.pkl` is the pickle. `NAME/data/KEY` is a storage of uncompressed numbers, so slices of a tensor are
read in place. All numbers are read once beforehand to verify their CRC-32.
"""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

from jaxir.core.errors import UserError
from jaxir.interop.weights import lazy, torch_pickle
from jaxir.interop.weights.lazy import LazyArray
from jaxir.storage import checksums

_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE, _ORDER = "data.pkl", "byteorder"
_PIECE = 1 << 20  # bytes read at a time
# Header of a member: signature, length of name, length of extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_file(path: Path) -> dict[str, LazyArray]:
    """Returns the tensors of a state dict by name, as lazy arrays."""
    with path.open("rb", buffering=0) as file:
        head = file.read(64)
        if head.startswith(_LEGACY):
            raise UserError(
                f"{path} is in torch's format from before 1.6, which is not supported: convert it in torch"
                " with torch.save(torch.load(PATH, weights_only=True), PATH)"
            )
        if not head.startswith(_ZIP):
            raise UserError(f"{path}: truncated, or not a file of torch.save; copy it again")
        archive = _Archive(path, file)
        order, content = archive.read(_ORDER, b"little"), archive.read(_PICKLE)
        # torch can be configured to write no checksums. A wrong checksum of the member "byteorder" shows
        # this.
        has_sums = archive.is_intact(_ORDER, order)
        if has_sums and not archive.is_intact(_PICKLE, content):
            raise UserError(f"{path}: its list of tensors is damaged (wrong checksum); copy the file again")
        if order != b"little":
            raise UserError(
                f"{path}: written on a big-endian machine, which is not supported; use safetensors"
            )
        found = torch_pickle.parse(content, path)
        arrays = {name: archive.open(name, tensor) for name, tensor in found.items()}
        if has_sums:
            archive.check_numbers(sorted({f"data/{tensor.storage.key}" for tensor in found.values()}))
        return arrays


class _Archive:
    """A zip archive of torch, which locates members without reading them."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path, self._file = path, file
        try:
            with zipfile.ZipFile(file) as opened:
                self._members = {member.filename: member for member in opened.infolist()}
        except Exception as error:  # zipfile raises many types of errors for damaged files
            raise UserError(f"{path}: truncated or damaged ({error!s:.100}); copy it again") from error
        pickles = [name for name in self._members if name.partition("/")[2] == _PICKLE]
        if len(pickles) != 1:
            raise UserError(f"{path}: a zip archive, but not one of torch.save (no {_PICKLE}); copy it again")
        self._root = pickles[0].removesuffix(_PICKLE)
        if f"{self._root}constants.pkl" in self._members:
            raise UserError(
                f"{path} is a TorchScript program, not weights: save the weights in torch with"
                " torch.save(torch.jit.load(PATH).state_dict(), OTHER_PATH)"
            )

    def read(self, name: str, default: bytes | None = None) -> bytes:
        if default is not None and f"{self._root}{name}" not in self._members:
            return default
        offset, size = self.find(name)
        return os.pread(self._file.fileno(), size, offset)

    def open(self, name: str, tensor: torch_pickle.Tensor) -> LazyArray:
        storage, (start, size) = tensor.storage, self.find(f"data/{tensor.storage.key}")
        if storage.count * storage.dtype.itemsize != size:
            raise UserError(
                f"{self.path} is damaged: {name:.100} needs {storage.count} numbers, but has {size} bytes;"
                " copy it again"
            )
        offset = start + tensor.offset * storage.dtype.itemsize
        return lazy.in_file(self.path, storage.dtype, offset, tensor.shape, tensor.strides)

    def is_intact(self, name: str, content: bytes) -> bool:
        """Returns whether `content` has the checksum of a member; True if there is no such member."""
        member = self._members.get(f"{self._root}{name}")
        return member is None or zlib.crc32(content) == member.CRC

    def check_numbers(self, names: list[str]) -> None:
        """Verifies the checksums of members; an unchanged file is read only once per machine."""
        sums = {name: self._members[f"{self._root}{name}"].CRC for name in names}
        expected = f"{zlib.crc32(repr(sums).encode()):08x}"

        def compare(path: Path) -> str:
            for name, sum_ in sums.items():
                (offset, size), found = self.find(name), 0
                for at in range(offset, offset + size, _PIECE):
                    piece = os.pread(self._file.fileno(), min(_PIECE, offset + size - at), at)
                    found = zlib.crc32(piece, found)
                if found != sum_:
                    raise UserError(
                        f"{path}: its part {name:.100} is damaged (wrong checksum); copy it again"
                    )
            return expected

        checksums.is_intact(self.path, expected, compare)

    def find(self, name: str) -> tuple[int, int]:
        """Returns a member's offset in the file and its size, in bytes."""
        member = self._members.get(f"{self._root}{name}")
        if member is None:
            raise UserError(f"{self.path}: its part {name:.100} is missing; copy the file again")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UserError(
                f"{self.path}: its part {name:.100} is compressed or encrypted, so another program than torch"
                " packed it; save it in torch again"
            )
        header = os.pread(self._file.fileno(), _LOCAL_HEADER.size, member.header_offset)
        if len(header) == _LOCAL_HEADER.size and header.startswith(_ZIP):
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            offset = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if offset + member.file_size <= os.fstat(self._file.fileno()).st_size:
                return offset, member.file_size
        raise UserError(
            f"{self.path}: truncated or damaged (its part {name:.100} is not at its offset); copy it again"
        )
