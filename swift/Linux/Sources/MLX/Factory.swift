import Cmlx

extension MLXArray {
    public static func zeros(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_zeros(&$0, shape.asInt32, shape.count, dtype.cmlxDtype, stream.ctx) }
    }

    public static func zeros(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray { zeros(shape, dtype: type.dtype, stream: stream) }

    public static func zeros(
        like array: MLXArray, stream: StreamOrDevice = .default
    ) -> MLXArray { zeros(array.shape, dtype: array.dtype, stream: stream) }

    public static func ones(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_ones(&$0, shape.asInt32, shape.count, dtype.cmlxDtype, stream.ctx) }
    }

    public static func ones(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray { ones(shape, dtype: type.dtype, stream: stream) }

    public static func ones(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        ones(array.shape, dtype: array.dtype, stream: stream)
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, dtype: DType,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        result {
            mlx_full(&$0, shape.asInt32, shape.count, values.ctx, dtype.cmlxDtype, stream.ctx)
        }
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, stream: StreamOrDevice = .default
    ) -> MLXArray { full(shape, values: values, dtype: values.dtype, stream: stream) }

    public static func repeated(
        _ array: MLXArray, count: Int, axis: Int, stream: StreamOrDevice = .default
    ) -> MLXArray { MLX.repeated(array, count: count, axis: axis, stream: stream) }
}

public func zeros(
    _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.zeros(shape, dtype: dtype, stream: stream) }

public func zeros(
    _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self,
    stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.zeros(shape, type: type, stream: stream) }

public func zeros(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray.zeros(like: array, stream: stream)
}

public func ones(
    _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.ones(shape, dtype: dtype, stream: stream) }

public func ones(
    _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self,
    stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.ones(shape, type: type, stream: stream) }

public func ones(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray.ones(like: array, stream: stream)
}

public func full(
    _ shape: some Collection<Int>, values: some ScalarOrArray, type: (some HasDType).Type,
    stream: StreamOrDevice = .default
) -> MLXArray {
    MLXArray.full(
        shape, values: values.asMLXArray(dtype: type.dtype), dtype: type.dtype, stream: stream)
}

public func full(
    _ shape: some Collection<Int>, values: MLXArray, dtype: DType,
    stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.full(shape, values: values, dtype: dtype, stream: stream) }

public func full(
    _ shape: some Collection<Int>, values: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.full(shape, values: values.asMLXArray(dtype: nil), stream: stream) }
