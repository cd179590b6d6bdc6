#include "sgemm.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "thread_pool.h"

namespace mlx_h2o {

namespace {

// As CBLAS numbers them.
constexpr int kRowMajor = 101, kNoTrans = 111;

// A piece reads at least this many elements of what is split (a quarter of a megabyte, some 25 us),
constexpr int64_t kPieceElements = 64 << 10;
// and of a product with many rows it is wide enough to pay for packing the other matrix again.
constexpr int kManyRows = 8, kPieceWidth = 192;
// Widths that no kernel has to pad.
constexpr int kWidthStep = 64;

std::atomic<Sgemm> piece{nullptr};

// Width of a piece of `size` columns (or rows) of k elements each, beside `other` rows (columns).
int piece_width(int size, int other, int k) {
  int64_t width = kPieceElements / std::max(k, 1);
  if (other > kManyRows) width = std::max<int64_t>(width, kPieceWidth);
  width = (width + kWidthStep - 1) / kWidthStep * kWidthStep;
  return static_cast<int>(std::clamp<int64_t>(width, kWidthStep, std::max(size, kWidthStep)));
}

}  // namespace

void set_piece_sgemm(Sgemm sgemm) {
  piece = sgemm;
}

Sgemm piece_sgemm() {
  return piece;
}

void sgemm_in_pieces(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc) {
  const Sgemm sgemm = piece;
  const bool columns = n >= m;
  const int size = columns ? n : m, width = piece_width(size, columns ? m : n, k);
  if (order != kRowMajor || size <= width) {
    sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  const int64_t b_step = trans_b == kNoTrans ? 1 : ldb, a_step = trans_a == kNoTrans ? lda : 1;
  ThreadPool::shared().run((size + width - 1) / width, [&](int i) {
    const int64_t first = int64_t(i) * width;
    const int part = std::min<int64_t>(width, size - first);
    if (columns) {
      sgemm(
          order, trans_a, trans_b, m, part, k, alpha, a, lda, b + first * b_step, ldb, beta,
          c + first, ldc);
    } else {
      sgemm(
          order, trans_a, trans_b, part, n, k, alpha, a + first * a_step, lda, b, ldb, beta,
          c + first * ldc, ldc);
    }
  });
}

}  // namespace mlx_h2o
