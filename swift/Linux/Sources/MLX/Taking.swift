import Cmlx

extension MLXArray {
    public func take(
        _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_take_axis(&$0, ctx, indices.ctx, Int32(axis), stream.ctx) } }

    public func take(_ indices: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        result { mlx_take(&$0, ctx, indices.ctx, stream.ctx) }
    }
}

public func take(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray { array.take(indices, axis: axis, stream: stream) }

public func take(
    _ array: MLXArray, _ indices: MLXArray, stream: StreamOrDevice = .default
) -> MLXArray { array.take(indices, stream: stream) }

public func takeAlong(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_take_along_axis(&$0, array.ctx, indices.ctx, Int32(axis), stream.ctx) }
}

public func takeAlong(
    _ array: MLXArray, _ indices: MLXArray, stream: StreamOrDevice = .default
) -> MLXArray { takeAlong(array.reshaped(-1), indices, axis: 0, stream: stream) }

public func putAlong(
    _ array: MLXArray, _ indices: MLXArray, values: MLXArray, axis: Int,
    stream: StreamOrDevice = .default
) -> MLXArray {
    result {
        mlx_put_along_axis(&$0, array.ctx, indices.ctx, values.ctx, Int32(axis), stream.ctx)
    }
}

public func putAlong(
    _ array: MLXArray, _ indices: MLXArray, values: MLXArray, stream: StreamOrDevice = .default
) -> MLXArray {
    putAlong(array.reshaped(-1), indices, values: values, axis: 0, stream: stream)
        .reshaped(array.shape, stream: stream)
}
