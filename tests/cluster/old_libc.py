"""Let a program that was linked against glibc 2.38 run with an older one.

From 2.38 on, the compiler turns ``strtol`` into ``__isoc23_strtol``, which also reads C23's binary
numbers and exists in no older library. A program that needs nothing else of 2.38 can be pointed
back: each such symbol gets the name and the version of the plain function, and the demand for
GLIBC_2.38 becomes a second demand for a version that is already asked for. 64-bit ELF only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

TOO_NEW = "GLIBC_2.38"
PREFIX = "__isoc23_"

# Types of sections, from elf.h.
SHT_DYNSYM = 11
SHT_GNU_VERNEED = 0x6FFFFFFE
SHT_GNU_VERSYM = 0x6FFFFFFF


class Unfixable(Exception):
    """The program needs more of the new library than what can be replaced."""


@dataclass(frozen=True)
class Need:
    """One version that the program asks of a library (Elf64_Vernaux)."""

    at: int
    digest: int
    index: int
    name_at: int
    name: str


def point_back(path: Path) -> list[str]:
    """Rewrite a program in place; the symbols that were pointed back."""
    program = Program(bytearray(path.read_bytes()))
    symbols = program.point_back()
    path.write_bytes(program.data)
    return symbols


class Program:
    def __init__(self, data: bytearray) -> None:
        if data[:5] != b"\x7fELF\x02":
            raise Unfixable("not a 64-bit ELF file")
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        #: name, type, flags, address, offset, size, link, info, alignment, size of an entry
        self.sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, table + number * size)
            for number in range(count)
        ]

    def section(self, kind: int) -> tuple[int, int, int]:
        """Where the section of a type is, how long it is, and where its names are."""
        for _, found, _, _, offset, size, link, *_ in self.sections:
            if found == kind:
                return offset, size, self.sections[link][4]
        raise Unfixable(f"no section of type {kind:#x}")

    def text(self, at: int) -> str:
        return self.data[at : self.data.index(0, at)].decode()

    def needs(self) -> list[Need]:
        library, _, names = self.section(SHT_GNU_VERNEED)
        found = []
        while True:
            _, count, _, first, step = struct.unpack_from("<HHIII", self.data, library)
            at = library + first
            for _ in range(count):
                digest, _, index, name, next_one = struct.unpack_from("<IHHII", self.data, at)
                found.append(Need(at, digest, index, name, self.text(names + name)))
                at += next_one
            if not step:
                return found
            library += step

    def point_back(self) -> list[str]:
        needs = sorted(
            (need for need in self.needs() if need.name.startswith("GLIBC_2.")),
            key=lambda need: [int(part) for part in need.name.removeprefix("GLIBC_").split(".")],
        )
        new = next((need for need in needs if need.name == TOO_NEW), None)
        if new is None:
            return []
        oldest = needs[0]  # strtol and its kind are in the first version of every architecture
        symbols = self.rename(new.index, oldest.index)
        substitute = needs[needs.index(new) - 1]
        struct.pack_into("<I", self.data, new.at, substitute.digest)
        struct.pack_into("<I", self.data, new.at + 8, substitute.name_at)
        return symbols

    def rename(self, new: int, old: int) -> list[str]:
        symbols, size, names = self.section(SHT_DYNSYM)
        versions, _, _ = self.section(SHT_GNU_VERSYM)
        renamed = []
        for number in range(size // 24):
            symbol, version = symbols + 24 * number, versions + 2 * number
            if struct.unpack_from("<H", self.data, version)[0] & 0x7FFF != new:
                continue
            (name_at,) = struct.unpack_from("<I", self.data, symbol)
            name = self.text(names + name_at)
            if not name.startswith(PREFIX):
                raise Unfixable(f"needs {name} of {TOO_NEW}")
            # The plain name is the end of the long one: no new text is needed.
            struct.pack_into("<I", self.data, symbol, name_at + len(PREFIX))
            struct.pack_into("<H", self.data, version, old)
            renamed.append(name)
        return renamed
