// Tile multiplication; filled per type as it pays. Returns false where the vector kernels do better.
#pragma once
PI_INLINE bool amx_linear(const PiLinear*, const PiActs*, int64_t, int64_t, int64_t, void*) { return false; }
