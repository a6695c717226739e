// Batch norm, forward: x [rows][c] (NHWC flattened), one mean and variance per channel.
// A block takes TRLOW_WIDTH channels; lane l adds rows l, l + 256, ... and the lanes add as a tree.
#include "trlow_kernel.h"

// partial[lane][j] = sum over the rows of the lane: of x, or with a mean of (x - mean)^2.
TRLOW_INLINE void add_rows(f32* partial, const f32* x, const f32* mean, i64 rows, i64 c,
                           int width) {
  TRLOW_EACH_LANE(lane, TRLOW_LANES) {
    for (int j = 0; j < width; ++j) partial[lane * TRLOW_WIDTH + j] = 0.0f;
  }
  for (i64 start = 0; start < rows; start += TRLOW_LANES) {
    const i64 left = rows - start < TRLOW_LANES ? rows - start : TRLOW_LANES;
    TRLOW_EACH_LANE(lane, left) {
      f32* const sum = partial + lane * TRLOW_WIDTH;
      const f32* const row = x + (start + lane) * c;
      if (mean == nullptr) {
        TRLOW_VECTOR for (int j = 0; j < width; ++j) sum[j] += row[j];
      } else {
        TRLOW_VECTOR for (int j = 0; j < width; ++j) {
          const f32 off = row[j] - mean[j];
          sum[j] += off * off;
        }
      }
    }
  }
}

TRLOW_BLOCK_KERNEL(bn_stats, f32* mean, f32* rstd, f32* next_mean, f32* next_var,
                   const f32* prev_mean, const f32* prev_var, const f32* x, const f32* momentum,
                   const f32* eps, i64 rows, i64 c) {
  TRLOW_SHARED(f32, partial, TRLOW_LANES * TRLOW_WIDTH);
  TRLOW_SHARED(f32, center, TRLOW_WIDTH);
  if (rows <= 0 || c <= 0) return;
  TRLOW_EACH_ITEM(item, (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH) {
    const i64 first = item * TRLOW_WIDTH;
    TRLOW_TILE(TRLOW_WIDTH, c - first, width,
               add_rows(partial, x + first, nullptr, rows, c, width));
    TRLOW_BARRIER();
    trlow_tree_lanes(partial, TRLOW_WIDTH);
    TRLOW_EACH_LANE(j, c - first < TRLOW_WIDTH ? c - first : TRLOW_WIDTH) {
      center[j] = partial[j] / (f32)rows;
      mean[first + j] = center[j];
      next_mean[first + j] = (1.0f - *momentum) * prev_mean[first + j] + *momentum * center[j];
    }
    TRLOW_BARRIER();
    TRLOW_TILE(TRLOW_WIDTH, c - first, width,
               add_rows(partial, x + first, center, rows, c, width));
    TRLOW_BARRIER();
    trlow_tree_lanes(partial, TRLOW_WIDTH);
    TRLOW_EACH_LANE(j, c - first < TRLOW_WIDTH ? c - first : TRLOW_WIDTH) {
      // biased for this batch, unbiased (over rows - 1) for the running variance
      const f32 unbiased = partial[j] / (f32)(rows > 1 ? rows - 1 : 1);
      rstd[first + j] = 1.0f / trlow_sqrt(partial[j] / (f32)rows + *eps);
      next_var[first + j] = (1.0f - *momentum) * prev_var[first + j] + *momentum * unbiased;
    }
    TRLOW_BARRIER();
  }
}

TRLOW_INLINE void normalize(f32* y, const f32* x, const f32* mean, const f32* rstd,
                            const f32* weight, const f32* bias, int lanes) {
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j)
    y[j] = (x[j] - mean[j]) * rstd[j] * weight[j] + bias[j];
}

TRLOW_KERNEL(bn_apply, f32* y, const f32* x, const f32* mean, const f32* rstd, const f32* weight,
             const f32* bias, i64 rows, i64 c) {
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, rows * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, at = item / tiles * c + first;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               normalize(y + at, x + at, mean + first, rstd + first, weight + first, bias + first,
                         lanes));
  }
}

TRLOW_INLINE void scale_shift(f32* y, const f32* x, const f32* scale, const f32* shift, int lanes) {
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j) y[j] = x[j] * scale[j] + shift[j];
}

TRLOW_KERNEL(bn_apply_eq, f32* y, const f32* x, const f32* eq_scale, const f32* eq_bias, i64 rows,
             i64 c) {
  const i64 tiles = (c + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, rows * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, at = item / tiles * c + first;
    TRLOW_TILE(TRLOW_WIDTH, c - first, lanes,
               scale_shift(y + at, x + at, eq_scale + first, eq_bias + first, lanes));
  }
}
