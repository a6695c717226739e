// Batch norm folded for inference: y = x * eq_scale + eq_bias with
//   eq_scale = weight / sqrt(var + eps),  eq_bias = bias - mean * eq_scale.
#include "trlow_kernel.h"

TRLOW_KERNEL(bn_inference, f32* eq_scale, f32* eq_bias, const f32* weight, const f32* bias,
             const f32* mean, const f32* var, const f32* eps, i64 count) {
  if (count <= 0) return;
  const f32 floor = *eps;
  TRLOW_EACH(i, count) {
    const f32 scale = weight[i] / trlow_sqrt(var[i] + floor);
    eq_scale[i] = scale;
    eq_bias[i] = bias[i] - mean[i] * scale;
  }
}
