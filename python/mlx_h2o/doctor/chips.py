"""Published figures of Apple's chips, by which measured times are judged. None was measured here.

Each number has its source beside it, and a source that is not Apple begins with "not Apple". Apple
publishes the bandwidth of M chips from M1 Pro on, in the announcements that are named (looked up on
2026-11-25 in the press's reports of them) and in technical specifications. Of M1 it says none (that
of M2 is "50 percent more"), and of A chips none: theirs is that of the memory that teardowns and
reviews name, on 64 bits. Arithmetic Apple named in the announcement of M1 and at the event of M1
Pro and M1 Max. Elsewhere it is GPU cores (Apple's number) x 128 lanes x 2 operations x a clock that
reviews report: 1.3 and 1.4 GHz of M1 Ultra and M2. Of M3 and what came later it is M3's, 1.38 GHz;
later ones are reported to be higher, so that this is a lower bound.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

#: What sources that are not Apple begin with.
NOT_APPLE = "not Apple: "
MEMORY = NOT_APPLE + "memory by teardowns and reviews, "
SPECIFICATIONS = "Apple's technical specifications of "
ANNOUNCED = "Apple's announcement of "
# A core's lanes, with two operations each.
_OF_CORE = 128 * 2


class Chip(NamedTuple):
    """What is published of a chip.

    Attributes:
        name: As in "M2 Pro".
        bandwidth: Memory bandwidth in bytes a second.
        operations: Float32 operations a second of the GPU; a multiply-add is two.
        bandwidth_from: The source of `bandwidth`.
        operations_from: The source of `operations`.
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


def _of_cores(cores: int, gigahertz: float = 1.38) -> tuple[float, str]:
    """Teraflops by a number of cores and a clock that reviews report, and the source in words."""
    bound = ", a lower bound" if gigahertz == 1.38 else ""
    teraflops = cores * _OF_CORE * gigahertz / 1e3
    return teraflops, f"{NOT_APPLE}{cores} cores at {gigahertz:g} GHz by reviews{bound}"


def _chip(name: str, bandwidth: tuple[float, str], operations: tuple[float, str]) -> Chip:
    (gigabytes, says), (teraflops, says_too) = bandwidth, operations
    return Chip(name, gigabytes * 1e9, teraflops * 1e12, says, says_too)


_M1_PRO_EVENT = "Apple's event of 2021-10-18"
# Of chips that are sold with fewer GPU cores too, those with most.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("M1", (68.25, MEMORY + "LPDDR4X-4266"), (2.6, ANNOUNCED + "2020-11-10")),
        _chip("M1 Pro", (200, ANNOUNCED + "2021-10-18"), (5.2, _M1_PRO_EVENT)),
        _chip("M1 Max", (400, ANNOUNCED + "2021-10-18"), (10.4, _M1_PRO_EVENT)),
        _chip("M1 Ultra", (800, ANNOUNCED + "2022-03-08"), _of_cores(64, 1.296)),
        _chip("M2", (100, ANNOUNCED + "2022-06-06"), _of_cores(10, 1.398)),
        _chip("M2 Pro", (200, ANNOUNCED + "2023-01-17"), _of_cores(19, 1.398)),
        _chip("M2 Max", (400, ANNOUNCED + "2023-01-17"), _of_cores(38, 1.398)),
        _chip("M2 Ultra", (800, ANNOUNCED + "2023-06-05"), _of_cores(76, 1.398)),
        _chip("M3", (100, SPECIFICATIONS + "MacBook Pro 2023"), _of_cores(10)),
        _chip("M3 Pro", (150, SPECIFICATIONS + "MacBook Pro 2023"), _of_cores(18)),
        _chip("M3 Max", (400, SPECIFICATIONS + "MacBook Pro 2023"), _of_cores(40)),
        _chip("M3 Ultra", (819, SPECIFICATIONS + "Mac Studio 2025"), _of_cores(80)),
        _chip("M4", (120, ANNOUNCED + "2024-05-07"), _of_cores(10)),
        _chip("M4 Pro", (273, ANNOUNCED + "2024-10-30"), _of_cores(20)),
        _chip("M4 Max", (546, ANNOUNCED + "2024-10-30"), _of_cores(40)),
        _chip("M5", (153, ANNOUNCED + "2025-10-15"), _of_cores(10)),
        _chip("M5 Pro", (307, ANNOUNCED + "2026-03-03"), _of_cores(20)),
        _chip("M5 Max", (614, ANNOUNCED + "2026-03-03"), _of_cores(40)),
        _chip("A17 Pro", (51.2, MEMORY + "LPDDR5-6400"), _of_cores(6)),
        _chip("A18", (60, MEMORY + "LPDDR5X-7500"), _of_cores(5)),
        _chip("A18 Pro", (60, MEMORY + "LPDDR5X-7500"), _of_cores(6)),
        _chip("A19", (68.3, MEMORY + "LPDDR5X-8533"), _of_cores(5)),
        _chip("A19 Pro", (76.8, MEMORY + "LPDDR5X-9600"), _of_cores(6)),
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
