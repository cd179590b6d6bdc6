// Rows in the format of mx.quantize (python/mlx_h2o/slots/packed.py): levels of BITS bits each, and a
// scale and a bias for every GROUP of a row's elements. The levels of a row are a stream of bits,
// lowest first, so 32 of them are BITS words. They become numbers in registers.

#include "rows.h"

namespace h2o {

// How rows are stored: packed, or dense where BITS is 0.
template <int BITS, int GROUP>
struct Packing {};

// The type of a stored row's elements, and how many it has, of those and of groups.
template <int BITS, typename T>
struct Stored {
  typedef uint Element;
};
template <typename T>
struct Stored<0, T> {
  typedef T Element;
};
#define ELEMENTS_OF(width, bits) ((bits) == 0 ? (width) : (width) / 32 * (bits))
#define GROUPS_OF(width, bits, group) ((bits) == 0 ? 0 : (width) / (group))

template <int BITS, int GROUP, typename Words, typename Scales>
struct PackedRows {
  Rows<Words> words;
  Rows<Scales> scales, biases;
};

// Rows of either kind, as what they are.
template <int GROUP, typename Elements, typename Scales>
inline Rows<Elements> stored_rows(
    Packing<0, GROUP>, Rows<Elements> rows, Rows<Scales>, Rows<Scales>) {
  return rows;
}

template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> stored_rows(
    Packing<BITS, GROUP>, Rows<Words> words, Rows<Scales> scales, Rows<Scales> biases) {
  return {words, scales, biases};
}

template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> from(
    PackedRows<BITS, GROUP, Words, Scales> rows, int batch, int head, int row) {
  move(rows.words, batch, head, row);
  move(rows.scales, batch, head, row);
  move(rows.biases, batch, head, row);
  return rows;
}

// Of a row, the 32 columns from `first`, a multiple of 32; they lie in one group.
template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> columns_from(
    PackedRows<BITS, GROUP, Words, Scales> rows, int first) {
  rows.words.data += first / 32 * BITS * rows.words.column;
  rows.scales.data += first / GROUP * rows.scales.column;
  rows.biases.data += first / GROUP * rows.biases.column;
  return rows;
}

// 32 bits of a stream, from bit `shift` (below 32) of one word on to the next word.
inline uint window(uint low, uint high, uint shift) {
  return low >> shift | high << 1 << (31 - shift);
}

// This lane's share of a row, in windows of 32 bits. The device gives each word once: a lane reads
// those that begin in its share and the one that its share begins in, and its share's end is what
// the next lane's begins with.
template <int W, int BITS, typename Words>
inline void load_windows(Rows<Words> rows, int row, int lane, thread uint* windows) {
  constexpr int SHARE = W * BITS, WHOLE = SHARE / 32;
  const int first = lane * SHARE / 32, owned = (lane + 1) * SHARE / 32 - first;
  const Words at = rows.data + row * rows.row + first * rows.column;
  uint words[WHOLE + 2];
  UNROLL
  for (int i = 0; i < WHOLE; i++) {
    words[i] = at[i * rows.column];
  }
  if (SHARE % 32 != 0) {
    if (WHOLE == 0) {
      words[0] = at[0];
    }
    if (32 % SHARE != 0) {
      const uint next = simd_shuffle(words[0], ushort((lane + 1) % 32));
      words[WHOLE + 1] = next;
      if (WHOLE > 0) {
        words[WHOLE] = owned > WHOLE ? uint(at[WHOLE * rows.column]) : next;
      }
    } else {
      words[1] = 0;
    }
  }
  UNROLL
  for (int i = 0; i * 32 < SHARE; i++) {
    windows[i] =
        SHARE % 32 == 0 ? words[i] : window(words[i], words[i + 1], uint(lane * SHARE % 32));
  }
}

// All lanes of a simdgroup must arrive.
template <int W, int BITS, int GROUP, typename Words, typename Scales, typename Share>
inline void load_share(
    PackedRows<BITS, GROUP, Words, Scales> rows, int row, int lane, thread Share* share) {
  constexpr uint LEVELS = 1u << BITS;
  uint windows[(W * BITS + 31) / 32 + 1];
  windows[(W * BITS + 31) / 32] = 0;
  load_windows<W, BITS>(rows.words, row, lane, windows);

  const int group = lane * W / GROUP;
  const float scale = float(rows.scales.data[row * rows.scales.row + group * rows.scales.column]);
  const float bias = float(rows.biases.data[row * rows.biases.row + group * rows.biases.column]);
  float next_scale = scale, next_bias = bias;
  // Where shares do not divide a group, one may reach into that which the next lane begins in.
  constexpr bool DIVIDES = GROUP % W == 0;
  if (!DIVIDES) {
    next_scale = simd_shuffle(scale, ushort((lane + 1) % 32));
    next_bias = simd_shuffle(bias, ushort((lane + 1) % 32));
  }
  const int here = GROUP - lane * W % GROUP;
  UNROLL
  for (int i = 0; i < W; i++) {
    const int at = i * BITS / 32, shift = i * BITS % 32;
    uint level = windows[at] >> shift;
    if (shift + BITS > 32) {
      level |= windows[at + 1] << (32 - shift);
    }
    const bool in_first = DIVIDES || i < here;
    share[i] = Share(
        float(level & (LEVELS - 1)) * (in_first ? scale : next_scale) +
        (in_first ? bias : next_bias));
  }
}

// Copies `count` rows to threadgroup memory as they are stored, all threads together.
template <int D, typename Elements, typename T>
inline void stage(
    Rows<Elements> rows, int count, Rows<threadgroup T*> to, int thread_index, int threads) {
  copy_rows<D>(rows, count, to, thread_index, threads);
}

template <int D, int BITS, int GROUP, typename Words, typename Scales, typename ToWords,
          typename ToScales>
inline void stage(
    PackedRows<BITS, GROUP, Words, Scales> rows, int count,
    PackedRows<BITS, GROUP, ToWords, ToScales> to, int thread_index, int threads) {
  copy_rows<D / 32 * BITS>(rows.words, count, to.words, thread_index, threads);
  copy_rows<D / GROUP>(rows.scales, count, to.scales, thread_index, threads);
  copy_rows<D / GROUP>(rows.biases, count, to.biases, thread_index, threads);
}

}  // namespace h2o
