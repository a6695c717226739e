// Batch norm, backward: dy, x, dx [rows][c], xhat = (x - mean) * rstd.
//   dbias += sum dy,  dweight += sum dy * xhat
//   dx = weight * rstd * (dy - mean(dy) - xhat * mean(dy * xhat))
// A block takes TRLOW_WIDTH channels; lane l adds rows l, l + 256, ... and the lanes add as a tree.
#include "trlow_kernel.h"

TRLOW_INLINE void add_gradients(f32* plain, f32* weighted, const f32* dy, const f32* x,
                                const f32* mean, const f32* rstd, i64 rows, i64 c, int width) {
  TRLOW_EACH_LANE(lane, TRLOW_LANES) {
    for (int j = 0; j < width; ++j) {
      plain[lane * TRLOW_WIDTH + j] = 0.0f;
      weighted[lane * TRLOW_WIDTH + j] = 0.0f;
    }
  }
  for (i64 start = 0; start < rows; start += TRLOW_LANES) {
    const i64 left = rows - start < TRLOW_LANES ? rows - start : TRLOW_LANES;
    TRLOW_EACH_LANE(lane, left) {
      f32 *const sum = plain + lane * TRLOW_WIDTH, *const product = weighted + lane * TRLOW_WIDTH;
      const f32 *const grad = dy + (start + lane) * c, *const row = x + (start + lane) * c;
      TRLOW_VECTOR for (int j = 0; j < width; ++j) {
        sum[j] += grad[j];
        product[j] += grad[j] * ((row[j] - mean[j]) * rstd[j]);
      }
    }
  }
}

// sums[0:c] = sum dy, sums[c:2c] = sum dy * xhat (overwritten); dweight and dbias accumulate.
TRLOW_BLOCK_KERNEL(bn_bwd_reduce, f32* dweight, f32* dbias, f32* sums, const f32* dy, const f32* x,
                   const f32* mean, const f32* rstd, i64 rows, i64 c) {
  TRLOW_SHARED(f32, plain, TRLOW_LANES * TRLOW_WIDTH);
  TRLOW_SHARED(f32, weighted, TRLOW_LANES * TRLOW_WIDTH);
  if (rows <= 0 || c <= 0) return;
  TRLOW_EACH_ITEM(item, (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH) {
    const i64 first = item * TRLOW_WIDTH;
    TRLOW_TILE(TRLOW_WIDTH, c - first, width,
               add_gradients(plain, weighted, dy + first, x + first, mean + first, rstd + first,
                             rows, c, width));
    TRLOW_BARRIER();
    trlow_tree_lanes(plain, TRLOW_WIDTH);
    trlow_tree_lanes(weighted, TRLOW_WIDTH);
    TRLOW_EACH_LANE(j, c - first < TRLOW_WIDTH ? c - first : TRLOW_WIDTH) {
      sums[first + j] = plain[j];
      sums[c + first + j] = weighted[j];
      dbias[first + j] += plain[j];
      dweight[first + j] += weighted[j];
    }
    TRLOW_BARRIER();
  }
}

TRLOW_INLINE void data_gradient(f32* dx, const f32* dy, const f32* x, const f32* mean,
                                const f32* rstd, const f32* weight, const f32* plain,
                                const f32* weighted, f32 rows, int lanes) {
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j) {
    const f32 xhat = (x[j] - mean[j]) * rstd[j];
    dx[j] = weight[j] * rstd[j] * (dy[j] - plain[j] / rows - xhat * (weighted[j] / rows));
  }
}

TRLOW_KERNEL(bn_bwd_data, f32* dx, const f32* dy, const f32* x, const f32* mean, const f32* rstd,
             const f32* weight, const f32* sums, i64 rows, i64 c) {
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, rows * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, at = item / tiles * c + first;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               data_gradient(dx + at, dy + at, x + at, mean + first, rstd + first, weight + first,
                             sums + first, sums + c + first, (f32)rows, lanes));
  }
}
