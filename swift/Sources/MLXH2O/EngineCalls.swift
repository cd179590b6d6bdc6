import CMLXH2O
import MLX

/// Throws what the engine says went wrong, for a status that is not 0.
func checkEngine(_ status: Int32) throws {
    guard status != 0 else { return }
    let message = String(cString: mlx_h2o_last_error())
    switch mlx_h2o_last_error_code() {
    case MLX_H2O_ERROR_STATE: throw H2OError.state(message)
    case MLX_H2O_ERROR_SAVED, MLX_H2O_ERROR_FILE: throw H2OError.file(message)
    case MLX_H2O_ERROR_PROGRAM: throw H2OError.policy(message)
    case MLX_H2O_ERROR_INTERNAL: throw H2OError.internal(message)
    default: throw H2OError.configuration(message)
    }
}

extension MLXFast.ScaledDotProductAttentionMaskMode {
    /// The mode's name in the engine.
    var engineMode: String {
        if mask != nil { return "array" }
        if case .causal = self { return "causal" }
        return ""
    }
}

/// Has MLX report an error where none can be thrown: see ``H2OKVCache/failure``.
func reportToMLX(_ error: any Error) {
    // It waits for mlx-swift's handler, which its first array installs.
    _ = MLXArray(0)
    mlx_h2o_report_error(error.localizedDescription)
}

/// The arrays of a list.
func arrays(of list: mlx_vector_array) -> [MLXArray] {
    (0 ..< mlx_vector_array_size(list)).map { i in
        var array = mlx_array_new()
        mlx_vector_array_get(&array, list, i)
        return MLXArray(array)
    }
}

/// The arrays of a map, by name.
func arrays(of map: mlx_map_string_to_array) -> [String: MLXArray] {
    let iterator = mlx_map_string_to_array_iterator_new(map)
    defer { mlx_map_string_to_array_iterator_free(iterator) }
    var arrays: [String: MLXArray] = [:], name: UnsafePointer<CChar>?
    while true {
        var array = mlx_array_new()
        let isOver = mlx_map_string_to_array_iterator_next(&name, &array, iterator) != 0
        let shared = MLXArray(array)
        guard !isOver, let name else { return arrays }
        arrays[String(cString: name)] = shared
    }
}

/// The texts of a map, by name.
func texts(of map: mlx_map_string_to_string) -> [String: String] {
    let iterator = mlx_map_string_to_string_iterator_new(map)
    defer { mlx_map_string_to_string_iterator_free(iterator) }
    var texts: [String: String] = [:], name: UnsafePointer<CChar>?, text: UnsafePointer<CChar>?
    while mlx_map_string_to_string_iterator_next(&name, &text, iterator) == 0, let name, let text {
        texts[String(cString: name)] = String(cString: text)
    }
    return texts
}

/// A map of the engine, to be freed.
func engineMap(of arrays: [String: MLXArray]) -> mlx_map_string_to_array {
    let map = mlx_map_string_to_array_new()
    for (name, array) in arrays { mlx_map_string_to_array_insert(map, name, array.ctx) }
    return map
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
    H2OKernels.areSetUp
    mlx_h2o_set_evaluator(
        { _, list in
            do {
                try checkedEval(arrays(of: list))
                return 0
            } catch {
                return 1
            }
        }, nil)
}()
