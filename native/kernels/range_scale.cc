// x *= *factor, in the element's own type; 16-bit elements multiply in fp32 and round once.
#include "trlow_kernel.h"

TRLOW_KERNEL(scale_f32, f32* x, const f32* factor, i64 count) {
  if (count <= 0) return;
  const f32 by = *factor;
  TRLOW_EACH(i, count) x[i] = x[i] * by;
}

TRLOW_KERNEL(scale_f16, u16* x, const f32* factor, i64 count) {
  if (count <= 0) return;
  const f32 by = *factor;
  TRLOW_EACH(i, count) x[i] = trlow_to_f16(trlow_from_f16(x[i]) * by);
}

TRLOW_KERNEL(scale_bf16, u16* x, const f32* factor, i64 count) {
  if (count <= 0) return;
  const f32 by = *factor;
  TRLOW_EACH(i, count) x[i] = trlow_to_bf16(trlow_from_bf16(x[i]) * by);
}
