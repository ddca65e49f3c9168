// Products of blocks on AMX tiles: their configuration, and the product.

#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "packing.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles as this library uses them while it lives; then as they were, for others keep a configuration between their calls.
// In assembly: GCC 12's intrinsics name 8 of the 64 bytes, and the compiler left out the stores to the others.
class Multiplier {
  TileConfig before;

 public:
  Multiplier() {
    const TileConfig ours;
    asm volatile("sttilecfg %0" : "=m"(before));
    asm volatile("ldtilecfg %0" : : "m"(ours));
  }
  ~Multiplier() {
    if (before.palette)
      asm volatile("ldtilecfg %0" : : "m"(before));
    else
      _tile_release();
  }
  Multiplier(const Multiplier&) = delete;
};

// out[32, 32] (+)= the product over `steps`.
inline void block(Side a, Side b, i64 steps, float* out, i64 stride, bool adds) {
  if (adds) {
    _tile_loadd(0, out, stride * 4);
    _tile_loadd(1, out + 16, stride * 4);
    _tile_loadd(2, out + 16 * stride, stride * 4);
    _tile_loadd(3, out + 16 * stride + 16, stride * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (i64 step = 0; step < steps; step++, a.from += a.step, b.from += b.step) {
    _tile_loadd(6, b.from, b.stride);
    _tile_loadd(4, a.from, a.stride);
    _tile_loadd(7, b.from + b.tile, b.stride);
    _tile_loadd(5, a.from + a.tile, a.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, stride * 4);
  _tile_stored(1, out + 16, stride * 4);
  _tile_stored(2, out + 16 * stride, stride * 4);
  _tile_stored(3, out + 16 * stride + 16, stride * 4);
}

// 0 if the system lets this process use tiles; it must be asked once, before the first product.
inline int ask_for_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return (int)syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

}  // namespace
