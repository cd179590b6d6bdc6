import Cmlx

// How Swift calls C: out-parameters as results, collections as handles.

@inline(__always)
func result(_ call: (inout mlx_array) -> Int32) -> MLXArray {
    var out = mlx_array_new()
    _ = call(&out)
    return MLXArray(out)
}

func results(_ call: (inout mlx_vector_array) -> Int32) -> [MLXArray] {
    var out = mlx_vector_array_new()
    defer { mlx_vector_array_free(out) }
    _ = call(&out)
    return (0 ..< mlx_vector_array_size(out)).map { i in
        result { mlx_vector_array_get(&$0, out, i) }
    }
}

func text(_ call: (inout mlx_string) -> Int32) -> String {
    var out = mlx_string_new()
    defer { mlx_string_free(out) }
    return call(&out) == 0 ? String(cString: mlx_string_data(out)) : ""
}

func withVector<R>(
    _ arrays: some Collection<MLXArray>, _ body: (mlx_vector_array) -> R
) -> R {
    let vector = mlx_vector_array_new()
    defer { mlx_vector_array_free(vector) }
    for array in arrays { mlx_vector_array_append_value(vector, array.ctx) }
    return body(vector)
}

extension Collection<Int> {
    var asInt32: [Int32] { map { Int32($0) } }
}

extension Int? {
    var asOptionalInt: mlx_optional_int {
        mlx_optional_int(value: Int32(self ?? 0), has_value: self != nil)
    }
}

/// An array's handle, or the empty one.
func handle(_ array: MLXArray?) -> mlx_array { array?.ctx ?? mlx_array_new() }
