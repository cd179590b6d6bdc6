import Cmlx

private typealias Unary = (UnsafeMutablePointer<mlx_array>?, mlx_array, mlx_stream) -> Int32
private typealias Binary =
    (UnsafeMutablePointer<mlx_array>?, mlx_array, mlx_array, mlx_stream) -> Int32

private func unary(_ call: Unary, _ array: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
    result { call(&$0, array.ctx, stream.ctx) }
}

private func binary(
    _ call: Binary, _ a: some ScalarOrArray, _ b: some ScalarOrArray, _ stream: StreamOrDevice
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    return result { call(&$0, a.ctx, b.ctx, stream.ctx) }
}

public func abs(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_abs, array, stream)
}
public func exp(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_exp, array, stream)
}
public func log(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_log, array, stream)
}
public func sigmoid(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sigmoid, array, stream)
}
public func sign(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sign, array, stream)
}
public func sin(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sin, array, stream)
}
public func cos(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_cos, array, stream)
}
public func sqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sqrt, array, stream)
}
public func square(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_square, array, stream)
}
public func negative(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_negative, array, stream)
}
public func isNaN(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_isnan, array, stream)
}
public func isFinite(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_isfinite, array, stream)
}
public func logicalNot(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_logical_not, array, stream)
}
public func bitwiseInvert(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_bitwise_invert, array, stream)
}

extension MLXArray {
    public func abs(stream: StreamOrDevice = .default) -> MLXArray { unary(mlx_abs, self, stream) }
    public func exp(stream: StreamOrDevice = .default) -> MLXArray { unary(mlx_exp, self, stream) }
    public func log(stream: StreamOrDevice = .default) -> MLXArray { unary(mlx_log, self, stream) }
    public func sin(stream: StreamOrDevice = .default) -> MLXArray { unary(mlx_sin, self, stream) }
    public func cos(stream: StreamOrDevice = .default) -> MLXArray { unary(mlx_cos, self, stream) }
    public func sqrt(stream: StreamOrDevice = .default) -> MLXArray {
        unary(mlx_sqrt, self, stream)
    }
    public func square(stream: StreamOrDevice = .default) -> MLXArray {
        unary(mlx_square, self, stream)
    }
}

public func add(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_add, a, b, stream) }
public func subtract(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_subtract, a, b, stream) }
public func multiply(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_multiply, a, b, stream) }
public func divide(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_divide, a, b, stream) }
public func remainder(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_remainder, a, b, stream) }
public func maximum(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_maximum, a, b, stream) }
public func minimum(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_minimum, a, b, stream) }
public func logicalAnd(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_logical_and, a, b, stream) }
public func logicalOr(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_logical_or, a, b, stream) }
public func equal(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_equal, a, b, stream) }
public func notEqual(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_not_equal, a, b, stream) }
public func less(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_less, a, b, stream) }
public func lessEqual(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_less_equal, a, b, stream) }
public func greater(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_greater, a, b, stream) }
public func greaterEqual(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_greater_equal, a, b, stream) }
public func bitwiseAnd(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_bitwise_and, a, b, stream) }
public func bitwiseOr(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_bitwise_or, a, b, stream) }
public func bitwiseXOr(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_bitwise_xor, a, b, stream) }
public func leftShift(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_left_shift, a, b, stream) }
public func rightShift(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_right_shift, a, b, stream) }

public func pow(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    binary(mlx_power, a, b, stream)
}
public func pow(
    _ a: MLXArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_power, a, b, stream) }
public func pow(
    _ a: some ScalarOrArray, _ b: MLXArray, stream: StreamOrDevice = .default
) -> MLXArray { binary(mlx_power, a, b, stream) }

public func round(
    _ array: MLXArray, decimals: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_round(&$0, array.ctx, Int32(decimals), stream.ctx) } }

extension MLXArray {
    public func pow(_ other: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
        binary(mlx_power, self, other, stream)
    }
    public func round(decimals: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.round(self, decimals: decimals, stream: stream)
    }
}

public func `where`(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray,
    stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    return result { mlx_where(&$0, condition.ctx, a.ctx, b.ctx, stream.ctx) }
}
public func which(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray,
    stream: StreamOrDevice = .default
) -> MLXArray { `where`(condition, a, b, stream: stream) }

extension MLXArray {
    public func allClose(
        _ other: some ScalarOrArray, rtol: Double = 1e-5, atol: Double = 1e-8,
        equalNaN: Bool = false,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (a, b) = toArrays(self, other)
        return result { mlx_allclose(&$0, a.ctx, b.ctx, rtol, atol, equalNaN, stream.ctx) }
    }
    public func arrayEqual(
        _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (a, b) = toArrays(self, other)
        return result { mlx_array_equal(&$0, a.ctx, b.ctx, equalNAN, stream.ctx) }
    }
}

public func allClose(
    _ array: MLXArray, _ other: some ScalarOrArray, rtol: Double = 1e-5, atol: Double = 1e-8,
    equalNaN: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    array.allClose(other, rtol: rtol, atol: atol, equalNaN: equalNaN, stream: stream)
}
public func arrayEqual(
    _ array: MLXArray, _ other: some ScalarOrArray, equalNAN: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.arrayEqual(other, equalNAN: equalNAN, stream: stream) }
