// Softmax cross-entropy with metrics: logits [n][classes], labels [n], result [3].
// *rows of the n rows are real: the others get dlogits 0 and count in no metric. result = sums
// over the real rows of loss, top-1 and top-5, each divided by n; dlogits = (softmax - onehot) / n.
// A row counts among the top k when fewer than k classes score above its label, an equal score of a
// lower index being above, so that top-1 is "the first maximum is the label". A NaN is above.
#include "trlow_kernel.h"

// Index of the first maximum.
TRLOW_INLINE i64 first_maximum(const f32* row, i64 classes) {
  i64 best = 0;
  for (i64 i = 1; i < classes; ++i) best = row[i] > row[best] ? i : best;
  return best;
}

TRLOW_INLINE i64 rank_of(const f32* row, i64 label, i64 classes) {
  i64 above = 0;
  for (i64 i = 0; i < classes; ++i)
    above += i != label && (!(row[i] <= row[label]) || (row[i] == row[label] && i < label));
  return above;
}

// Gradient of one real row; returns its loss, NaN for a label that is no class.
TRLOW_INLINE f32 row_loss(f32* gradient, const f32* row, i64 label, f32 most, i64 n, i64 classes) {
  f32 sum = 0.0f;
  for (i64 i = 0; i < classes; ++i) {
    gradient[i] = trlow_exp(row[i] - most);
    sum += gradient[i];
  }
  for (i64 i = 0; i < classes; ++i)
    gradient[i] = (gradient[i] / sum - (i == label ? 1.0f : 0.0f)) / (f32)n;
  if (label < 0 || label >= classes) return trlow_float(0x7fc00000u);
  return trlow_log(sum) - (row[label] - most);
}

TRLOW_BLOCK_KERNEL(softmax_xent, f32* result, f32* dlogits, i32* predicted, const f32* logits,
                   const i32* labels, const f32* rows, i64 n, i64 classes) {
  TRLOW_SHARED(f32, loss, TRLOW_LANES);
  TRLOW_SHARED(f32, top1, TRLOW_LANES);
  TRLOW_SHARED(f32, top5, TRLOW_LANES);
  if (n <= 0 || classes <= 0) return;
  TRLOW_EACH_ITEM(item, 1) {
    TRLOW_EACH_LANE(lane, TRLOW_LANES) {
      loss[lane] = top1[lane] = top5[lane] = 0.0f;
      for (i64 r = lane; r < n; r += TRLOW_LANES) {
        const f32* const row = logits + r * classes;
        f32* const gradient = dlogits + r * classes;
        const i64 best = first_maximum(row, classes), label = labels[r];
        predicted[r] = (i32)best;
        if ((f32)r < *rows) {
          loss[lane] += row_loss(gradient, row, label, row[best], n, classes);
          const bool known = label >= 0 && label < classes;
          const i64 rank = known ? rank_of(row, label, classes) : classes;
          top1[lane] += known && rank < 1 ? 1.0f : 0.0f;
          top5[lane] += known && rank < 5 ? 1.0f : 0.0f;
        } else {
          for (i64 i = 0; i < classes; ++i) gradient[i] = 0.0f;
        }
      }
    }
    TRLOW_BARRIER();
    trlow_tree_lanes(loss, 1);
    trlow_tree_lanes(top1, 1);
    trlow_tree_lanes(top5, 1);
    TRLOW_EACH_LANE(lane, 1) {
      result[0] = loss[0] / (f32)n;
      result[1] = top1[0] / (f32)n;
      result[2] = top5[0] / (f32)n;
    }
    TRLOW_BARRIER();
  }
}
