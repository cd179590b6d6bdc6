"""Published figures of Apple's chips, by which measured times are judged. None was measured here.

Bandwidth of M chips: Apple's announcements (apple.com/newsroom) and technical specifications. Of A
chips Apple says nothing: it is that of the memory which teardowns and reviews name (LPDDR5-6400,
LPDDR5X-7500, -8533, -9600 on 64 bits). Arithmetic of M1 and M2: Apple's announcements. From M3 and
A17 on Apple names no number: GPU cores x 128 lanes x 2 operations x 1.38 GHz, a clock that reviews
report of M3; later ones are reported to be higher, so that this is a lower bound.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

ANNOUNCED = "Apple's announcements and technical specifications"
REPORTED = "teardowns and reviews; Apple does not publish it"
# Operations a second of a GPU core at the clock that is reported of M3.
_OF_CORE = 128 * 2 * 1.38e9


class Chip(NamedTuple):
    """What is published of a chip.

    Attributes:
        name: As in "M2 Pro".
        bandwidth: Of memory, bytes a second.
        operations: Float32 operations a second of the GPU; a multiply-add is two.
        bandwidth_from: Who says so.
        operations_from: Likewise.
    """

    name: str
    bandwidth: float
    operations: float
    bandwidth_from: str
    operations_from: str

    @property
    def note(self) -> str:
        """Where the figures are from, in words."""
        return (
            f"{self.name}, published figures: {self.bandwidth / 1e9:g} GB/s ({self.bandwidth_from})"
            f", {self.operations / 1e12:.1f} TFLOPS in float32 ({self.operations_from}). A "
            "prediction is the larger of bytes over bandwidth and instructions over arithmetic: "
            "the least time there can be, without launches."
        )


def _announced(name: str, gigabytes: float, teraflops: float) -> Chip:
    return Chip(name, gigabytes * 1e9, teraflops * 1e12, ANNOUNCED, ANNOUNCED)


def _by_cores(name: str, gigabytes: float, cores: int, source: str = ANNOUNCED) -> Chip:
    own = f"{cores} cores at 1.38 GHz, a lower bound"
    return Chip(name, gigabytes * 1e9, cores * _OF_CORE, source, own)


# Of chips that are sold with fewer GPU cores too, those with most.
CHIPS = {
    chip.name: chip
    for chip in (
        _announced("M1", 68.25, 2.6),
        _announced("M1 Pro", 200, 5.2),
        _announced("M1 Max", 400, 10.4),
        _announced("M1 Ultra", 800, 21),
        _announced("M2", 100, 3.6),
        _announced("M2 Pro", 200, 6.8),
        _announced("M2 Max", 400, 13.6),
        _announced("M2 Ultra", 800, 27.2),
        _by_cores("M3", 100, 10),
        _by_cores("M3 Pro", 150, 18),
        _by_cores("M3 Max", 400, 40),
        _by_cores("M3 Ultra", 819, 80),
        _by_cores("M4", 120, 10),
        _by_cores("M4 Pro", 273, 20),
        _by_cores("M4 Max", 546, 40),
        _by_cores("M5", 153, 10),
        _by_cores("M5 Pro", 307, 20),
        _by_cores("M5 Max", 614, 40),
        _by_cores("A17 Pro", 51.2, 6, REPORTED),
        _by_cores("A18", 60, 5, REPORTED),
        _by_cores("A18 Pro", 60, 6, REPORTED),
        _by_cores("A19", 68.3, 5, REPORTED),
        _by_cores("A19 Pro", 76.8, 6, REPORTED),
    )
}


def chip_named(name: str) -> Chip:
    """A chip by its name, with or without "Apple".

    Raises:
        ValueError: Nothing is known of it.
    """
    wanted = " ".join(name.split()).removeprefix("Apple ").lower()
    for known, chip in CHIPS.items():
        if known.lower() == wanted:
            return chip
    near = difflib.get_close_matches(name, CHIPS, 1)
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    names = ", ".join(CHIPS)
    raise ValueError(f"No figures of {name!r} are known; of {names} they are.{suggestion}")


def chip_of(device: str) -> Chip | None:
    """The chip that a GPU's name tells, or None."""
    try:
        return chip_named(device)
    except ValueError:
        return None
