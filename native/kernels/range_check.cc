// *flag = 1 when any element is NaN or infinite; the flag is never cleared here. Several threads
// may write the same 1.
#include "trlow_kernel.h"

TRLOW_KERNEL(nan_check_f32, i32* flag, const f32* x, i64 count) {
  i32 bad = 0;
  TRLOW_EACH(i, count) bad |= (trlow_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
  if (bad) *flag = 1;
}

TRLOW_KERNEL(nan_check_f16, i32* flag, const u16* x, i64 count) {
  i32 bad = 0;
  TRLOW_EACH(i, count) bad |= (x[i] & 0x7c00) == 0x7c00;
  if (bad) *flag = 1;
}

TRLOW_KERNEL(nan_check_bf16, i32* flag, const u16* x, i64 count) {
  i32 bad = 0;
  TRLOW_EACH(i, count) bad |= (x[i] & 0x7f80) == 0x7f80;
  if (bad) *flag = 1;
}
