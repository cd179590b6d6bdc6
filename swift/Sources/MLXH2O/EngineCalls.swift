import CMLXH2O
import MLX

/// Throws what the engine says went wrong, for a status that is not 0.
func checkEngine(_ status: Int32) throws {
    guard status != 0 else { return }
    throw H2OError.configuration(String(cString: mlx_h2o_last_error()))
}

/// The array that a call of the engine gives out.
func engineArray(_ call: (inout mlx_array) -> Int32) throws -> MLXArray {
    var result = mlx_array_new()
    let status = call(&result)
    let array = MLXArray(result)
    try checkEngine(status)
    return array
}

/// Done once: all that the engine evaluates by itself goes through mlx-swift, which evaluates behind a
/// lock of its own.
let installedEvaluator: Void = {
    mlx_h2o_set_evaluator(
        { _, arrays in
            let all = (0 ..< mlx_vector_array_size(arrays)).map { i in
                var array = mlx_array_new()
                mlx_vector_array_get(&array, arrays, i)
                return MLXArray(array)
            }
            do {
                try checkedEval(all)
                return 0
            } catch {
                return 1
            }
        }, nil)
}()
