// A float32 matrix product in pieces that the thread pool shares out.
#pragma once

namespace mlx_h2o {

// cblas_sgemm's own signature, with enumerations as int.
using Sgemm = void (*)(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);

// The product that each piece is made with, on one thread; it must be safe to call from several.
void set_piece_sgemm(Sgemm sgemm);
Sgemm piece_sgemm();

// The same signature. Pieces depend on the shape alone, so the number of threads changes nothing.
void sgemm_in_pieces(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);

}  // namespace mlx_h2o
