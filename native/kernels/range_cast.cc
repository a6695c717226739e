// Casts between fp32 and the 16-bit floats, round to nearest even.
#include "trlow_kernel.h"

TRLOW_KERNEL(cast_f32_f16, u16* dst, const f32* src, i64 count) {
  TRLOW_EACH(i, count) dst[i] = trlow_to_f16(src[i]);
}

TRLOW_KERNEL(cast_f16_f32, f32* dst, const u16* src, i64 count) {
  TRLOW_EACH(i, count) dst[i] = trlow_from_f16(src[i]);
}

TRLOW_KERNEL(cast_f32_bf16, u16* dst, const f32* src, i64 count) {
  TRLOW_EACH(i, count) dst[i] = trlow_to_bf16(src[i]);
}

TRLOW_KERNEL(cast_bf16_f32, f32* dst, const u16* src, i64 count) {
  TRLOW_EACH(i, count) dst[i] = trlow_from_bf16(src[i]);
}
