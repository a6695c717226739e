// Convolution, fp32, NHWC: x [n][h][width][cin], w [kh][kw][cin][cout], y [n][ho][wo][cout], padded
// with zeros. Every sum has one fixed order: forward and weight gradient add one by one, the data
// gradient adds in TRLOW_STRANDS strands that meet in a tree.
#include "trlow_kernel.h"

struct Span {
  i64 first, end;
};

// Taps k of a kernel of size taps for which out * stride - pad + k lies in [0, size).
TRLOW_INLINE Span taps_inside(i64 out, i64 size, i64 taps, i64 stride, i64 pad) {
  const i64 start = out * stride - pad;
  return {start < 0 ? -start : 0, start + taps > size ? size - start : taps};
}

// Outputs o in [0, outs) for which o * stride - pad + tap lies in [0, size).
TRLOW_INLINE Span outputs_inside(i64 tap, i64 size, i64 outs, i64 stride, i64 pad) {
  const i64 room = size - 1 + pad - tap;
  const i64 first = pad > tap ? (pad - tap + stride - 1) / stride : 0;
  const i64 end = room < 0 ? 0 : room / stride + 1;
  return {first, end < outs ? end : outs};
}

// Taps k with in + pad - k = o * stride for some o in [0, outs): first, first + stride, ... < end.
TRLOW_INLINE Span taps_reaching(i64 in, i64 outs, i64 taps, i64 stride, i64 pad) {
  const i64 reach = in + pad, last = reach - (outs - 1) * stride;
  return {last > 0 ? last : reach % stride, reach < taps ? reach + 1 : taps};
}

// One pixel, `lanes` output channels; x[corner] is what its tap (0, 0) would read, in x or not.
TRLOW_INLINE void forward_tile(f32* y, const f32* x, i64 corner, const f32* w, i64 width, i64 cin,
                               i64 cout, i64 kw, Span rows, Span columns, int lanes) {
  f32 sum[TRLOW_WIDTH];
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] = 0.0f;
  for (i64 r = rows.first; r < rows.end; ++r) {
    for (i64 s = columns.first; s < columns.end; ++s) {
      const f32* const pixel = x + (corner + (r * width + s) * cin);
      const f32* const tap = w + (r * kw + s) * cin * cout;
      for (i64 i = 0; i < cin; ++i) {
        TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[j] += pixel[i] * tap[i * cout + j];
      }
    }
  }
  TRLOW_VECTOR for (int j = 0; j < lanes; ++j) y[j] = sum[j];
}

TRLOW_KERNEL(conv2d_fwd, f32* y, const f32* x, const f32* w, i64 n, i64 h, i64 width, i64 cin,
             i64 ho, i64 wo, i64 cout, i64 kh, i64 kw, i64 stride, i64 pad) {
  if (n * ho * wo * cout <= 0) return;
  const i64 tiles = (cout + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  TRLOW_EACH(item, n * ho * wo * tiles) {
    const i64 first = item % tiles * TRLOW_WIDTH, pixel = item / tiles;
    const i64 column = pixel % wo, row = pixel / wo % ho, image = pixel / wo / ho;
    const Span rows = taps_inside(row, h, kh, stride, pad);
    const Span columns = taps_inside(column, width, kw, stride, pad);
    const i64 corner = ((image * h + row * stride - pad) * width + column * stride - pad) * cin;
    TRLOW_TILE(TRLOW_WIDTH, cout - first, lanes,
               forward_tile(y + pixel * cout + first, x, corner, w + first, width, cin, cout, kw,
                            rows, columns, lanes));
  }
}

// One pixel, `lanes` input channels; the sums run over taps and output channels.
TRLOW_INLINE void data_tile(f32* dx, const f32* dy, const f32* w, i64 row, i64 column, i64 cin,
                            i64 wo, i64 cout, i64 kw, i64 stride, Span rows, Span columns,
                            int lanes) {
  f32 sum[TRLOW_ROWS][TRLOW_STRANDS], rest[TRLOW_ROWS];
  for (int i = 0; i < lanes; ++i) {
    rest[i] = 0.0f;
    TRLOW_VECTOR for (int j = 0; j < TRLOW_STRANDS; ++j) sum[i][j] = 0.0f;
  }
  const i64 whole = cout - cout % TRLOW_STRANDS;
  for (i64 r = rows.first; r < rows.end; r += stride) {
    for (i64 s = columns.first; s < columns.end; s += stride) {
      const f32* const grad = dy + ((row - r) / stride * wo + (column - s) / stride) * cout;
      const f32* const tap = w + (r * kw + s) * cin * cout;
      for (i64 o = 0; o < whole; o += TRLOW_STRANDS) {
        for (int i = 0; i < lanes; ++i) {
          TRLOW_VECTOR for (int j = 0; j < TRLOW_STRANDS; ++j)
            sum[i][j] += grad[o + j] * tap[i * cout + o + j];
        }
      }
      for (i64 o = whole; o < cout; ++o) {
        for (int i = 0; i < lanes; ++i) rest[i] += grad[o] * tap[i * cout + o];
      }
    }
  }
  for (int i = 0; i < lanes; ++i) dx[i] = trlow_tree_sum(sum[i]) + rest[i];
}

TRLOW_KERNEL(conv2d_bwd_data, f32* dx, const f32* dy, const f32* w, i64 n, i64 h, i64 width,
             i64 cin, i64 ho, i64 wo, i64 cout, i64 kh, i64 kw, i64 stride, i64 pad) {
  if (n * h * width * cin <= 0) return;
  const i64 tiles = (cin + TRLOW_ROWS - 1) / TRLOW_ROWS;
  TRLOW_EACH(item, n * h * width * tiles) {
    const i64 first = item % tiles * TRLOW_ROWS, pixel = item / tiles;
    const i64 column = pixel % width, row = pixel / width % h, image = pixel / width / h;
    const Span rows = taps_reaching(row, ho, kh, stride, pad);
    const Span columns = taps_reaching(column, wo, kw, stride, pad);
    TRLOW_TILE(TRLOW_ROWS, cin - first, lanes,
               data_tile(dx + pixel * cin + first, dy + image * ho * wo * cout, w + first * cout,
                         row + pad, column + pad, cin, wo, cout, kw, stride, rows, columns, lanes));
  }
}

// `rows` input channels times `lanes` output channels of one tap; the sums run over all pixels.
TRLOW_INLINE void weight_tile(f32* dw, const f32* x, const f32* dy, i64 n, i64 h, i64 width,
                              i64 cin, i64 ho, i64 wo, i64 cout, i64 stride, i64 down, i64 right,
                              Span high, Span wide, int rows, int lanes) {
  f32 sum[TRLOW_ROWS][TRLOW_WIDTH];
  for (int i = 0; i < rows; ++i) {
    TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[i][j] = 0.0f;
  }
  for (i64 image = 0; image < n; ++image) {
    for (i64 r = high.first; r < high.end; ++r) {
      const i64 line = (image * h + r * stride + down) * width + right;
      for (i64 s = wide.first; s < wide.end; ++s) {
        const f32* const pixel = x + (line + s * stride) * cin;
        const f32* const grad = dy + ((image * ho + r) * wo + s) * cout;
        for (int i = 0; i < rows; ++i) {
          TRLOW_VECTOR for (int j = 0; j < lanes; ++j) sum[i][j] += pixel[i] * grad[j];
        }
      }
    }
  }
  for (int i = 0; i < rows; ++i) {
    TRLOW_VECTOR for (int j = 0; j < lanes; ++j) dw[i * cout + j] += sum[i][j];
  }
}

TRLOW_KERNEL(conv2d_bwd_weight, f32* dw, const f32* x, const f32* dy, i64 n, i64 h, i64 width,
             i64 cin, i64 ho, i64 wo, i64 cout, i64 kh, i64 kw, i64 stride, i64 pad) {
  if (kh * kw * cin * cout <= 0) return;
  const i64 tiles = (cout + TRLOW_WIDTH - 1) / TRLOW_WIDTH;
  const i64 bands = (cin + TRLOW_ROWS - 1) / TRLOW_ROWS;
  TRLOW_EACH(item, kh * kw * bands * tiles) {
    const i64 out = item % tiles * TRLOW_WIDTH, in = item / tiles % bands * TRLOW_ROWS;
    const i64 tap = item / tiles / bands, r = tap / kw, s = tap % kw;
    const Span high = outputs_inside(r, h, ho, stride, pad);
    const Span wide = outputs_inside(s, width, wo, stride, pad);
    TRLOW_TILE(
        TRLOW_ROWS, cin - in, rows,
        TRLOW_TILE(TRLOW_WIDTH, cout - out, lanes,
                   weight_tile(dw + (tap * cin + in) * cout + out, x + in, dy + out, n, h, width,
                               cin, ho, wo, cout, stride, r - pad, s - pad, high, wide, rows,
                               lanes)));
  }
}
