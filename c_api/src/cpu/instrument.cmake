# instrument(target): what MLX_H2O_SANITIZE asks for.
option(MLX_H2O_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(MLX_H2O_PRECOMPILED "Read MLX's headers once for all files: half of the time" ${MLX_H2O_SANITIZE})

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

# mlx_once(target, header): reads MLX's headers once for all files of a target that tests build. Other
# builds go without, so that each file must include what it needs.
function(mlx_once target header)
  if(MLX_H2O_PRECOMPILED)
    target_precompile_headers(${target} PRIVATE "${header}")
  endif()
endfunction()
