// Optimizer updates: g' = g * grad_scale + weight_decay * w, then
//   sgd       w -= lr * g'
//   momentum  m = mu * m + g',  w -= lr * m
//   nesterov  m = mu * m + g',  w -= lr * (g' + mu * m)
// The bias forms have no weight decay. Nothing is written when *skip is not 0. With lr = 0 every
// byte of w stays (even where a gradient is infinite, and -0 stays -0); the moments still advance.
#include "trlow_kernel.h"

TRLOW_INLINE f32 moved(f32 w, f32 lr, f32 direction) { return lr == 0.0f ? w : w - lr * direction; }

TRLOW_KERNEL(sgd_weight, f32* w, const f32* g, const f32* lr, const f32* weight_decay,
             const f32* grad_scale, const i32* skip, i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, decay = *weight_decay, scale = *grad_scale;
  TRLOW_EACH(i, count) w[i] = moved(w[i], rate, g[i] * scale + decay * w[i]);
}

TRLOW_KERNEL(sgd_bias, f32* w, const f32* g, const f32* lr, const f32* grad_scale, const i32* skip,
             i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, scale = *grad_scale;
  TRLOW_EACH(i, count) w[i] = moved(w[i], rate, g[i] * scale);
}

TRLOW_KERNEL(momentum_weight, f32* w, f32* m, const f32* g, const f32* lr, const f32* mu,
             const f32* weight_decay, const f32* grad_scale, const i32* skip, i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, keep = *mu, decay = *weight_decay, scale = *grad_scale;
  TRLOW_EACH(i, count) {
    const f32 moment = keep * m[i] + (g[i] * scale + decay * w[i]);
    m[i] = moment;
    w[i] = moved(w[i], rate, moment);
  }
}

TRLOW_KERNEL(momentum_bias, f32* w, f32* m, const f32* g, const f32* lr, const f32* mu,
             const f32* grad_scale, const i32* skip, i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, keep = *mu, scale = *grad_scale;
  TRLOW_EACH(i, count) {
    const f32 moment = keep * m[i] + g[i] * scale;
    m[i] = moment;
    w[i] = moved(w[i], rate, moment);
  }
}

TRLOW_KERNEL(nesterov_weight, f32* w, f32* m, const f32* g, const f32* lr, const f32* mu,
             const f32* weight_decay, const f32* grad_scale, const i32* skip, i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, keep = *mu, decay = *weight_decay, scale = *grad_scale;
  TRLOW_EACH(i, count) {
    const f32 gradient = g[i] * scale + decay * w[i];
    const f32 moment = keep * m[i] + gradient;
    m[i] = moment;
    w[i] = moved(w[i], rate, gradient + keep * moment);
  }
}

TRLOW_KERNEL(nesterov_bias, f32* w, f32* m, const f32* g, const f32* lr, const f32* mu,
             const f32* grad_scale, const i32* skip, i64 count) {
  if (count <= 0 || *skip != 0) return;
  const f32 rate = *lr, keep = *mu, scale = *grad_scale;
  TRLOW_EACH(i, count) {
    const f32 gradient = g[i] * scale;
    const f32 moment = keep * m[i] + gradient;
    m[i] = moment;
    w[i] = moved(w[i], rate, gradient + keep * moment);
  }
}
