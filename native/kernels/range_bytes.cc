// clear and copy on bytes: 16 at a time where the addresses allow it, the rest one by one.
#include "trlow_kernel.h"

// Bytes in front of the first 16-byte boundary, at most nbytes.
TRLOW_INLINE i64 bytes_to_boundary(const u8* pointer, i64 nbytes) {
  const i64 head = -trlow_address(pointer) & 15;
  return head < nbytes ? head : nbytes;
}

TRLOW_INLINE void copy_bytes(u8* dst, const u8* src, i64 nbytes) {
  const bool together = ((trlow_address(dst) ^ trlow_address(src)) & 15) == 0;
  const i64 head = together ? bytes_to_boundary(dst, nbytes) : nbytes;
  const i64 chunks = (nbytes - head) / 16, tail = head + chunks * 16;
  TRLOW_EACH(i, head) dst[i] = src[i];
  Chunk* const wide_dst = (Chunk*)(dst + head);
  const Chunk* const wide_src = (const Chunk*)(src + head);
  TRLOW_EACH(i, chunks) wide_dst[i] = wide_src[i];
  TRLOW_EACH(i, nbytes - tail) dst[tail + i] = src[tail + i];
}

TRLOW_KERNEL(clear, u8* dst, i64 nbytes) {
  const i64 head = bytes_to_boundary(dst, nbytes);
  const i64 chunks = (nbytes - head) / 16, tail = head + chunks * 16;
  TRLOW_EACH(i, head) dst[i] = 0;
  Chunk* const wide = (Chunk*)(dst + head);
  TRLOW_EACH(i, chunks) wide[i] = Chunk{{0, 0, 0, 0}};
  TRLOW_EACH(i, nbytes - tail) dst[tail + i] = 0;
}

TRLOW_KERNEL(copy, u8* dst, const u8* src, i64 nbytes) { copy_bytes(dst, src, nbytes); }

// dst stays as it is when *skip is not 0.
TRLOW_KERNEL(copy_unless, u8* dst, const u8* src, const i32* skip, i64 nbytes) {
  if (nbytes <= 0 || *skip != 0) return;
  copy_bytes(dst, src, nbytes);
}
