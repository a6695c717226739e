// Many tensors by one launch. An entry of `table` names a piece of them: offsets from the bases that
// the kernel is given (addresses, where a base is 0), then how much. A block takes one entry at a
// time, so fewer blocks than entries leave multiprocessors to others.
#include "trlow_kernel.h"

#define ROWS_AHEAD 4  // loads of a thread before its first store

TRLOW_INLINE bool rows_aligned(const void* pointer) { return (trlow_address(pointer) & 15) == 0; }

// An entry is {offset in dst, offset in src, bytes}: dst = src. The sources lie *shift further on;
// a null pointer stands for 0.
TRLOW_BLOCK_KERNEL(gather_rows, u8* dst, const u8* src, const i64* shift, const i64* table,
                   i64 entries) {
  TRLOW_EACH_ITEM(entry, entries) {
    u8* const to = dst + table[3 * entry];
    const u8* const from = src + (shift ? *shift : 0) + table[3 * entry + 1];
    const i64 nbytes = table[3 * entry + 2];
    const i64 chunks = rows_aligned(to) && rows_aligned(from) ? nbytes / 16 : 0;
    Chunk* const wide_to = (Chunk*)to;
    const Chunk* const wide_from = (const Chunk*)from;
    const i64 step = trlow_threads();
    for (i64 first = trlow_thread(); first < chunks; first += ROWS_AHEAD * step) {
      Chunk held[ROWS_AHEAD];
      for (int j = 0; j < ROWS_AHEAD; ++j)
        if (first + j * step < chunks) held[j] = wide_from[first + j * step];
      for (int j = 0; j < ROWS_AHEAD; ++j)
        if (first + j * step < chunks) wide_to[first + j * step] = held[j];
    }
    const i64 whole = 16 * chunks;
    const bool words_fit = ((trlow_address(to) | trlow_address(from)) & 3) == 0;
    const i64 words = words_fit ? (nbytes - whole) / 4 : 0, end = whole + 4 * words;
    TRLOW_EACH_LANE(i, words) ((u32*)(to + whole))[i] = ((const u32*)(from + whole))[i];
    TRLOW_EACH_LANE(i, nbytes - end) to[end + i] = from[end + i];
  }
}

// now = the slot that is *turn's, of `turns` slots of `count` values in turn; then the next one's.
// The slots may be pinned host memory, in which a CPU writes ahead.
TRLOW_KERNEL(take_turn, i64* now, const i64* slots, i64* turn, i64 turns, i64 count) {
  if (turns == 0 || trlow_block() != 0 || trlow_thread() != 0) return;
  const i64* const slot = slots + *turn % turns * count;
  for (i64 i = 0; i < count; ++i) now[i] = slot[i];
  *turn = *turn + 1;
}

// A gradient: one's own, and what a peer adds to it unless that is a null pointer.
struct Gradient {
  const f32 *own, *more;
};

TRLOW_INLINE f32 rows_gradient(Gradient g, i64 i) { return g.more ? g.own[i] + g.more[i] : g.own[i]; }

TRLOW_INLINE Chunk rows_gradients(Gradient g, i64 quad) {
  Chunk sum = ((const Chunk*)g.own)[quad];
  if (g.more) {
    const Chunk more = ((const Chunk*)g.more)[quad];
    for (int j = 0; j < 4; ++j)
      sum.word[j] = trlow_bits(trlow_float(sum.word[j]) + trlow_float(more.word[j]));
  }
  return sum;
}

// The formulas of torch.optim.SGD with momentum and without dampening: g += decay * w,
// m = mu * m + g, w -= lr * (nesterov ? g + mu * m : m).
struct Momentum {
  f32 rate, mu, decay;
  bool nesterov;
};

TRLOW_INLINE void momentum_move(f32* w, f32* m, f32 g, Momentum by) {
  const f32 gradient = g + by.decay * *w, moment = by.mu * *m + gradient;
  *m = moment;
  *w -= by.rate * (by.nesterov ? gradient + by.mu * moment : moment);
}

// An entry is {offsets in w, m, g and o, elements}; the gradient is g + o, or g where an offset from
// a null o is 0. `numbers` are mu, decay, whether it is nesterov.
TRLOW_BLOCK_KERNEL(momentum_rows, f32* w, f32* m, const f32* g, const f32* o, const f32* lr,
                   const f64* numbers, const i64* table, i64 entries) {
  if (entries <= 0) return;
  const Momentum by = {*lr, (f32)numbers[0], (f32)numbers[1], numbers[2] != 0.0};
  TRLOW_EACH_ITEM(entry, entries) {
    const i64* const at = table + 5 * entry;
    f32 *const weight = w + at[0], *const moment = m + at[1];
    const Gradient gradient = {g + at[2], o + at[3]};
    const bool wide = rows_aligned(weight) && rows_aligned(moment) && rows_aligned(gradient.own) &&
                      rows_aligned(gradient.more);
    const i64 quads = wide ? at[4] / 4 : 0;
    TRLOW_EACH_LANE(i, quads) {
      Chunk a = ((Chunk*)weight)[i], b = ((Chunk*)moment)[i];
      const Chunk c = rows_gradients(gradient, i);
      for (int j = 0; j < 4; ++j) {
        f32 one = trlow_float(a.word[j]), two = trlow_float(b.word[j]);
        momentum_move(&one, &two, trlow_float(c.word[j]), by);
        a.word[j] = trlow_bits(one);
        b.word[j] = trlow_bits(two);
      }
      ((Chunk*)moment)[i] = b;
      ((Chunk*)weight)[i] = a;
    }
    TRLOW_EACH_LANE(i, at[4] - 4 * quads) {
      const i64 j = 4 * quads + i;
      momentum_move(weight + j, moment + j, rows_gradient(gradient, j), by);
    }
  }
}

// base^exponent for a whole exponent, within a few ulp of a double.
TRLOW_INLINE f64 rows_power(f64 base, i64 exponent) {
  f64 power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) power *= base;
    base *= base;
  }
  return power;
}

// The formulas of torch.optim.Adam and AdamW; of the two decays one is 0:
// g += coupled * w, w -= lr * decoupled * w, m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g²,
// w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps).
struct Adam {
  f32 toward1, beta2, toward2, epsilon, coupled, kept, rate, root;
};

TRLOW_INLINE void adam_move(f32* w, f32* m, f32* v, f32 g, Adam by) {
  const f32 gradient = g + by.coupled * *w, weight = by.kept * *w;
  const f32 moment = *m + by.toward1 * (gradient - *m);
  const f32 square = by.beta2 * *v + by.toward2 * gradient * gradient;
  *m = moment;
  *v = square;
  *w = weight - by.rate * moment / (trlow_sqrt(square) / by.root + by.epsilon);
}

// An entry is {offsets in w, m, v, g and o, elements}, as above; `numbers` are beta1, beta2, epsilon,
// the coupled and the decoupled decay; `steps` is t, this step included.
TRLOW_BLOCK_KERNEL(adam_rows, f32* w, f32* m, f32* v, const f32* g, const f32* o, const f32* lr,
                   const f32* steps, const f64* numbers, const i64* table, i64 entries) {
  if (entries <= 0) return;
  const f64 beta1 = numbers[0], beta2 = numbers[1];
  const i64 step = (i64)*steps;
  const f32 rate = *lr, one = (f32)(1.0 - rows_power(beta1, step));
  const f32 two = (f32)(1.0 - rows_power(beta2, step));
  const Adam by = {(f32)(1.0 - beta1), (f32)beta2, (f32)(1.0 - beta2), (f32)numbers[2],
                   (f32)numbers[3], 1.0f - rate * (f32)numbers[4], rate / one, trlow_sqrt(two)};
  TRLOW_EACH_ITEM(entry, entries) {
    const i64* const at = table + 6 * entry;
    f32 *const weight = w + at[0], *const moment = m + at[1], *const square = v + at[2];
    const Gradient gradient = {g + at[3], o + at[4]};
    const bool wide = rows_aligned(weight) && rows_aligned(moment) && rows_aligned(square) &&
                      rows_aligned(gradient.own) && rows_aligned(gradient.more);
    const i64 quads = wide ? at[5] / 4 : 0;
    TRLOW_EACH_LANE(i, quads) {
      Chunk a = ((Chunk*)weight)[i], b = ((Chunk*)moment)[i], c = ((Chunk*)square)[i];
      const Chunk d = rows_gradients(gradient, i);
      for (int j = 0; j < 4; ++j) {
        f32 x = trlow_float(a.word[j]), y = trlow_float(b.word[j]), z = trlow_float(c.word[j]);
        adam_move(&x, &y, &z, trlow_float(d.word[j]), by);
        a.word[j] = trlow_bits(x);
        b.word[j] = trlow_bits(y);
        c.word[j] = trlow_bits(z);
      }
      ((Chunk*)moment)[i] = b;
      ((Chunk*)square)[i] = c;
      ((Chunk*)weight)[i] = a;
    }
    TRLOW_EACH_LANE(i, at[5] - 4 * quads) {
      const i64 j = 4 * quads + i;
      adam_move(weight + j, moment + j, square + j, rows_gradient(gradient, j), by);
    }
  }
}
