// Pooling, fp32, NHWC, without padding. Max pool: windows k x k, the first maximum (row by row)
// wins and a NaN is larger than any number. Average pool: over all hw positions of an image.
#include "trlow_kernel.h"

// Largest value of one window and where it lies (row * k + column in the window).
TRLOW_INLINE void window_maximum(f32* best, i32* place, const f32* x, i64 width, i64 c, i64 k,
                                 int lanes) {
  for (int j = 0; j < lanes; ++j) {
    best[j] = x[j];
    place[j] = 0;
  }
  for (i64 r = 0; r < k; ++r) {
    for (i64 s = 0; s < k; ++s) {
      const f32* const pixel = x + (r * width + s) * c;
      const i32 here = (i32)(r * k + s);
      TRLOW_VECTOR for (int j = 0; j < lanes; ++j) {
        const f32 value = pixel[j], most = best[j];
        const bool larger = value > most || (value != value && most == most);
        best[j] = larger ? value : most;
        place[j] = larger ? here : place[j];
      }
    }
  }
}

TRLOW_INLINE void pool_tile(f32* y, const f32* x, i64 width, i64 c, i64 k, int lanes) {
  f32 best[TRLOW_WIDTH];
  i32 place[TRLOW_WIDTH];
  window_maximum(best, place, x, width, c, k, lanes);
  for (int j = 0; j < lanes; ++j) y[j] = best[j];
}

TRLOW_KERNEL(maxpool_fwd, f32* y, const f32* x, i64 n, i64 h, i64 width, i64 c, i64 ho, i64 wo,
             i64 k, i64 stride) {
  if (n * ho * wo * c <= 0) return;
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * ho * wo * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, pixel = item / tiles;
    const i64 column = pixel % wo, row = pixel / wo % ho, image = pixel / wo / ho;
    const i64 corner = ((image * h + row * stride) * width + column * stride) * c + first;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               pool_tile(y + pixel * c + first, x + corner, width, c, k, lanes));
  }
}

// One input pixel gathers from the windows whose first maximum it is. x and dy begin at the image.
TRLOW_INLINE void gather_tile(f32* dx, const f32* dy, const f32* x, i64 row, i64 column, i64 width,
                              i64 c, i64 ho, i64 wo, i64 k, i64 stride, int lanes) {
  f32 sum[TRLOW_WIDTH], best[TRLOW_WIDTH];
  i32 place[TRLOW_WIDTH];
  for (int j = 0; j < lanes; ++j) sum[j] = 0.0f;
  for (i64 r = row < k ? 0 : (row - k) / stride + 1; r < ho && r * stride <= row; ++r) {
    for (i64 s = column < k ? 0 : (column - k) / stride + 1; s < wo && s * stride <= column; ++s) {
      window_maximum(best, place, x + (r * width + s) * stride * c, width, c, k, lanes);
      const i32 here = (i32)((row - r * stride) * k + column - s * stride);
      const f32* const grad = dy + (r * wo + s) * c;
      TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] += place[j] == here ? grad[j] : 0.0f;
    }
  }
  for (int j = 0; j < lanes; ++j) dx[j] = sum[j];
}

TRLOW_KERNEL(maxpool_bwd, f32* dx, const f32* dy, const f32* x, i64 n, i64 h, i64 width, i64 c,
             i64 ho, i64 wo, i64 k, i64 stride) {
  if (n * h * width * c <= 0) return;
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * h * width * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, pixel = item / tiles;
    const i64 column = pixel % width, row = pixel / width % h, image = pixel / width / h;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               gather_tile(dx + pixel * c + first, dy + image * ho * wo * c + first,
                           x + image * h * width * c + first, row, column, width, c, ho, wo, k,
                           stride, lanes));
  }
}

TRLOW_INLINE void average_tile(f32* y, const f32* x, i64 hw, i64 c, int lanes) {
  f32 sum[TRLOW_WIDTH];
  for (int j = 0; j < lanes; ++j) sum[j] = 0.0f;
  for (i64 i = 0; i < hw; ++i) {
    TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] += x[i * c + j];
  }
  for (int j = 0; j < lanes; ++j) y[j] = sum[j] / (f32)hw;
}

TRLOW_KERNEL(avgpool_fwd, f32* y, const f32* x, i64 n, i64 hw, i64 c) {
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, image = item / tiles;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               average_tile(y + image * c + first, x + image * hw * c + first, hw, c, lanes));
  }
}

TRLOW_INLINE void spread_tile(f32* dx, const f32* dy, i64 hw, int lanes) {
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j) dx[j] = dy[j] / (f32)hw;
}

TRLOW_KERNEL(avgpool_bwd, f32* dx, const f32* dy, i64 n, i64 hw, i64 c) {
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * hw * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, pixel = item / tiles;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               spread_tile(dx + pixel * c + first, dy + pixel / hw * c + first, hw, lanes));
  }
}
