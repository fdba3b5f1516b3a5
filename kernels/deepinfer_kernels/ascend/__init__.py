"""Ascend 950: programs in TileLang's dialect for it, lowered to AscendC source without the hardware.

No such device was at hand: sources are compiled to binaries only where CANN's bisheng is, and no engine runs on one.
Tests run the sources through an emulation of the intrinsics on the CPU and compare with the reference: addresses, tiles
and arithmetic are checked, what the hardware does with them is not.
"""
