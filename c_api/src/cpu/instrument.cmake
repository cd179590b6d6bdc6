# instrument(target): what MLX_H2O_SANITIZE asks for.
option(MLX_H2O_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

function(instrument target)
  if(MLX_H2O_SANITIZE)
    # Checks are calls: inline they take gcc three times as long to compile. Lines are all that
    # reports name, and more to debug by takes a third of the time.
    target_compile_options(${target} PRIVATE
      -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1
      $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>)
    target_compile_definitions(${target} PRIVATE MLX_H2O_SANITIZE)
  endif()
endfunction()

# mlx_once(target): reads MLX's headers once for all files of an instrumented target, which is a
# quarter of its time. Other builds go without, so that each file must include what it needs.
function(mlx_once target)
  if(MLX_H2O_SANITIZE)
    target_precompile_headers(${target} PRIVATE <mlx/mlx.h>)
  endif()
endfunction()
