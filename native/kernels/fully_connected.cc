// Fully connected layer: x [n][cin], w [cin][cout], b [cout], y [n][cout]. Sums as in conv2d.cc.
#include "trlow_kernel.h"

TRLOW_INLINE void forward_tile(f32* y, const f32* x, const f32* w, const f32* b, i64 cin, i64 cout,
                               int lanes) {
  f32 sum[TRLOW_WIDTH];
  for (int j = 0; j < lanes; ++j) sum[j] = b[j];
  for (i64 i = 0; i < cin; ++i) {
    TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] += x[i] * w[i * cout + j];
  }
  for (int j = 0; j < lanes; ++j) y[j] = sum[j];
}

TRLOW_KERNEL(fc_fwd, f32* y, const f32* x, const f32* w, const f32* b, i64 n, i64 cin, i64 cout) {
  const i64 tiles = (cout + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, row = item / tiles;
    TRLOW_TILE(TRLOW_WIDTH, cout - first, lanes,
               forward_tile(y + row * cout + first, x + row * cin, w + first, b + first, cin, cout,
                            lanes));
  }
}

TRLOW_KERNEL(fc_bwd_data, f32* dx, const f32* dy, const f32* w, i64 n, i64 cin, i64 cout) {
  const i64 whole = cout - cout % TRLOW_STRANDS;
  TRLOW_EACH(item, n * cin) {
    const f32 *const grad = dy + item / cin * cout, *const weight = w + item % cin * cout;
    f32 sum[TRLOW_STRANDS], rest = 0.0f;
    for (int j = 0; j < TRLOW_STRANDS; ++j) sum[j] = 0.0f;
    for (i64 o = 0; o < whole; o += TRLOW_STRANDS) {
      TRLOW_VECTOR for (int j = 0; j < TRLOW_STRANDS; ++j) sum[j] += grad[o + j] * weight[o + j];
    }
    for (i64 o = whole; o < cout; ++o) rest += grad[o] * weight[o];
    dx[item] = trlow_tree_sum(sum) + rest;
  }
}

// `rows` input channels times `lanes` outputs, summed over the batch.
TRLOW_INLINE void weight_tile(f32* dw, const f32* x, const f32* dy, i64 n, i64 cin, i64 cout,
                              int rows, int lanes) {
  f32 sum[TRLOW_ROWS][TRLOW_WIDTH];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < lanes; ++j) sum[i][j] = 0.0f;
  }
  for (i64 row = 0; row < n; ++row) {
    for (int i = 0; i < rows; ++i) {
      const f32* const grad = dy + row * cout;
      TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[i][j] += x[row * cin + i] * grad[j];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < lanes; ++j) dw[i * cout + j] += sum[i][j];
  }
}

TRLOW_KERNEL(fc_bwd_weight, f32* dw, const f32* x, const f32* dy, i64 n, i64 cin, i64 cout) {
  const i64 tiles = (cout + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, (cin + TRLOW_ROWS - 1) / TRLOW_ROWS * tiles) {
    const i64 out = item % tiles * TRLOW_WIDTH, in = item / tiles * TRLOW_ROWS;
    TRLOW_TILE(TRLOW_ROWS, cin - in, rows,
               TRLOW_TILE(TRLOW_WIDTH, cout - out, lanes,
                          weight_tile(dw + in * cout + out, x + in, dy + out, n, cin, cout, rows,
                                      lanes)));
  }
}

TRLOW_INLINE void bias_tile(f32* db, const f32* dy, i64 n, i64 cout, int lanes) {
  f32 sum[TRLOW_WIDTH];
  for (int j = 0; j < lanes; ++j) sum[j] = 0.0f;
  for (i64 row = 0; row < n; ++row) {
    TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] += dy[row * cout + j];
  }
  for (int j = 0; j < lanes; ++j) db[j] += sum[j];
}

TRLOW_KERNEL(fc_bwd_bias, f32* db, const f32* dy, i64 n, i64 cout) {
  TRLOW_EACH(item, (cout + TRLOW_WIDTH - 1) / TRLOW_WIDTH) {
    const i64 first = item * TRLOW_WIDTH;
    TRLOW_TILE(TRLOW_WIDTH, cout - first, lanes, bias_tile(db + first, dy + first, n, cout, lanes));
  }
}
