// x += other; 16-bit elements add in fp32 and round once.
#include "trlow_kernel.h"

TRLOW_KERNEL(add_f32, f32* x, const f32* other, i64 count) {
  TRLOW_EACH(i, count) x[i] = x[i] + other[i];
}

TRLOW_KERNEL(add_f16, u16* x, const u16* other, i64 count) {
  TRLOW_EACH(i, count) x[i] = trlow_to_f16(trlow_from_f16(x[i]) + trlow_from_f16(other[i]));
}

TRLOW_KERNEL(add_bf16, u16* x, const u16* other, i64 count) {
  TRLOW_EACH(i, count) x[i] = trlow_to_bf16(trlow_from_bf16(x[i]) + trlow_from_bf16(other[i]));
}
