// Marks that a graph leaves while it runs: how far it is, and when. One thread writes each.
#include "trlow_kernel.h"

// *counter += by, and the sum goes to *slot, which may be pinned host memory that a CPU polls.
TRLOW_KERNEL(beat, i64* counter, i64* slot, i64 by) {
  if (by == 0 || trlow_block() != 0 || trlow_thread() != 0) return;
  *counter = *counter + by;
  trlow_publish(slot, *counter);
}

// The clock in nanoseconds into entry `index` of the row that *row says, of `rows` rows in turn.
TRLOW_KERNEL(stamp, i64* slots, const i64* row, i64 index, i64 stride, i64 rows) {
  if (rows == 0 || trlow_block() != 0 || trlow_thread() != 0) return;
  slots[(*row % rows) * stride + index] = trlow_clock_ns();
}

// *row += by: the next step writes the next row.
TRLOW_KERNEL(next_row, i64* row, i64 by) {
  if (by == 0 || trlow_block() != 0 || trlow_thread() != 0) return;
  *row = *row + by;
}
