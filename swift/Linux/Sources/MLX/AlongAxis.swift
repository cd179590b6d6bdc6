import Cmlx

public func softmax(
    _ array: MLXArray, precise: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_softmax(&$0, array.ctx, precise, stream.ctx) } }

public func softmax(
    _ array: MLXArray, axis: Int, precise: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_softmax_axis(&$0, array.ctx, Int32(axis), precise, stream.ctx) } }

public func softmax(
    _ array: MLXArray, axes: some Collection<Int>, precise: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_softmax_axes(&$0, array.ctx, axes.asInt32, axes.count, precise, stream.ctx) }
}

public func cumsum(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true,
    stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_cumsum(&$0, array.ctx, Int32(axis), reverse, inclusive, stream.ctx) }
}

public func cumsum(
    _ array: MLXArray, reverse: Bool = false, inclusive: Bool = true,
    stream: StreamOrDevice = .default
) -> MLXArray {
    cumsum(array.reshaped(-1), axis: 0, reverse: reverse, inclusive: inclusive, stream: stream)
}

extension MLXArray {
    public func cumsum(
        axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.cumsum(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream)
    }

    public func cumsum(
        reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
    ) -> MLXArray { MLX.cumsum(self, reverse: reverse, inclusive: inclusive, stream: stream) }
}

public func sorted(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_sort_axis(&$0, array.ctx, Int32(axis), stream.ctx) } }

public func sorted(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    sorted(array.reshaped(-1), axis: 0, stream: stream)
}

public func argSort(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_argsort_axis(&$0, array.ctx, Int32(axis), stream.ctx) } }

public func argSort(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    argSort(array.reshaped(-1), axis: 0, stream: stream)
}

public func argPartition(
    _ array: MLXArray, kth: Int, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_argpartition_axis(&$0, array.ctx, Int32(kth), Int32(axis), stream.ctx) }
}

public func argPartition(
    _ array: MLXArray, kth: Int, stream: StreamOrDevice = .default
) -> MLXArray { argPartition(array.reshaped(-1), kth: kth, axis: 0, stream: stream) }

public func top(
    _ array: MLXArray, k: Int, axis: Int = -1, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_topk_axis(&$0, array.ctx, Int32(k), Int32(axis), stream.ctx) } }
