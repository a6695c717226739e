// ReLU. A NaN goes through, so that the NaN check can see it.
#include "trlow_kernel.h"

TRLOW_KERNEL(relu_fwd, f32* y, const f32* x, i64 count) {
  TRLOW_EACH(i, count) y[i] = x[i] <= 0.0f ? 0.0f : x[i];
}

TRLOW_KERNEL(relu_bwd, f32* dx, const f32* dy, const f32* y, i64 count) {
  TRLOW_EACH(i, count) {
    const f32 gradient = dy[i];
    dx[i] = y[i] <= 0.0f ? 0.0f : gradient;
  }
}
