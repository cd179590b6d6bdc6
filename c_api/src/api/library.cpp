// mlx_h2o.h: the library.
#include "attend.h"
#include "evaluation.h"
#include "gpu/self_check.h"
#include "handles.h"
#include "mlx/c/mlx.h"
#include "operands.h"

using namespace mlx_h2o;

extern "C" {

const char* mlx_h2o_version(void) {
  return MLX_H2O_VERSION;
}

const char* mlx_h2o_last_error(void) {
  return last_error().message.c_str();
}

mlx_h2o_error mlx_h2o_last_error_code(void) {
  return last_error().code;
}

int mlx_h2o_report_error(const char* message) {
  return guarded([&] {
    check(message, "What to report is missing.");
    _mlx_error("mlx-h2o", 0, "%s", message);
  });
}

int mlx_h2o_use_kernels(bool use) {
  use_kernels(use);
  return 0;
}

int mlx_h2o_set_notice(mlx_h2o_notice notice, void* context) {
  set_notice(notice, context);
  return 0;
}

int mlx_h2o_verdicts(mlx_string* res) {
  return guarded([&] {
    wants(res);
    give(res, Json(verdicts()).text());
  });
}

int mlx_h2o_set_evaluator(mlx_h2o_evaluator evaluator, void* context) {
  set_evaluator(evaluator, context);
  return 0;
}

}  // extern "C"
