"""A stretch of one parameter, as a server holds it."""

from __future__ import annotations

import msgspec

LINE = 64
"""Pieces are cut at multiples of this many elements. torch's vector loops do the last elements of a stretch one by one,
with other roundings (a product and a sum fused in one, not in the other): a cut elsewhere gives other bits. 64 is the
longest body of such a loop, two AVX-512 registers of halves."""


class Piece(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Elements lo to hi of the run's parameter number `param`, in the order in which they lie in memory."""

    param: int
    lo: int
    hi: int
    at: int = 0
    """Where it begins in its fragment."""

    def fits(self, numel: int) -> bool:
        """Whether a parameter of this many elements can be cut so."""
        whole_lines = self.lo % LINE == 0 and (self.hi % LINE == 0 or self.hi == numel)
        return whole_lines and 0 <= self.lo <= self.hi <= numel
