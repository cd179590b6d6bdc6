import Cmlx

public func matmul(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    result { mlx_matmul(&$0, a.ctx, b.ctx, stream.ctx) }
}

extension MLXArray {
    public func matmul(_ other: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.matmul(self, other, stream: stream)
    }
}

public func addMM(
    _ c: some ScalarOrArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray, alpha: Float = 1,
    beta: Float = 1, stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    let c = toArrays(c, a).0
    return result { mlx_addmm(&$0, c.ctx, a.ctx, b.ctx, alpha, beta, stream.ctx) }
}

public func einsum(
    _ subscripts: String, _ operands: MLXArray..., stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(operands) { vector in
        result { mlx_einsum(&$0, subscripts, vector, stream.ctx) }
    }
}

public func inner(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    result { mlx_inner(&$0, a.ctx, b.ctx, stream.ctx) }
}

public func tril(_ array: MLXArray, k: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
    result { mlx_tril(&$0, array.ctx, Int32(k), stream.ctx) }
}
