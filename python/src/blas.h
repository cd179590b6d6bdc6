// Which BLAS and LAPACK libmlx calls, and others in their place.
#pragma once

#include <string>

namespace mlx_h2o {

// The file whose cblas_sgemm multiplies for libmlx now; empty where that cannot be told (not
// Linux).
std::string blas_file();

// What libmlx takes from the folder of blas_file(), it takes from an OpenBLAS from now on, where
// `name` is called `prefix + name` and integers are as wide as in what it replaces: one thread,
// and matrix products in pieces on the thread pool (sgemm.h), since OpenBLAS's own threads wait for
// one another and for work in loops that take the cores from the kernels. Call it while no array is
// being computed. Returns how many functions changed: none where cblas_sgemm cannot.
int redirect_blas(const std::string& library, const std::string& prefix);

// Undoes it.
void restore_blas();

}  // namespace mlx_h2o
