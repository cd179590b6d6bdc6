# instrument(target): what MLX_H2O_SANITIZE asks for.
option(MLX_H2O_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

function(instrument target)
  if(MLX_H2O_SANITIZE)
    # Checks are calls: inline they take gcc three times as long to compile.
    target_compile_options(${target} PRIVATE
      -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g
      $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>)
    target_compile_definitions(${target} PRIVATE MLX_H2O_SANITIZE)
  endif()
endfunction()
