// total += metrics * *factor, unless *skip is not 0.
#include "trlow_kernel.h"

TRLOW_KERNEL(accumulate_metrics, f32* total, const f32* metrics, const f32* factor, const i32* skip,
             i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 by = *factor;
  TRLOW_EACH(i, count) total[i] = total[i] + metrics[i] * by;
}
