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

    public static func arange(
        _ start: Double, _ stop: Double, step: Double = 1, dtype: DType = .float32,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_arange(&$0, start, stop, step, dtype.cmlxDtype, stream.ctx) }
    }

    public static func arange(
        _ start: Int, _ stop: Int, step: Int = 1, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        arange(Double(start), Double(stop), step: Double(step), dtype: dtype, stream: stream)
    }

    public static func arange(
        _ start: Int, _ stop: Int, step: Int = 1, stream: StreamOrDevice = .default
    ) -> MLXArray { arange(start, stop, step: step, dtype: .int32, stream: stream) }

    public static func arange(
        _ stop: Int, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray { arange(0, stop, dtype: dtype, stream: stream) }

    public static func arange(_ stop: Int, stream: StreamOrDevice = .default) -> MLXArray {
        arange(0, stop, stream: stream)
    }

    public static func linspace<T: HasDType & BinaryFloatingPoint>(
        _ start: T, _ stop: T, count: Int = 50, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result {
            mlx_linspace(
                &$0, Double(start), Double(stop), Int32(count), T.dtype.cmlxDtype, stream.ctx)
        }
    }

    public static func tri(
        _ n: Int, m: Int? = nil, k: Int = 0, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_tri(&$0, Int32(n), Int32(m ?? n), Int32(k), dtype.cmlxDtype, stream.ctx) }
    }

    public static func eye(
        _ n: Int, m: Int? = nil, k: Int = 0, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_eye(&$0, Int32(n), Int32(m ?? n), Int32(k), dtype.cmlxDtype, stream.ctx) }
    }

    public static func eye(
        _ n: Int, m: Int? = nil, k: Int = 0, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray { eye(n, m: m, k: k, dtype: type.dtype, stream: stream) }

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

public func arange(
    _ start: Int, _ stop: Int, step: Int = 1, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.arange(start, stop, step: step, stream: stream) }

public func arange(
    _ start: Int, _ stop: Int, step: Int = 1, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.arange(start, stop, step: step, dtype: dtype, stream: stream) }

public func arange(_ stop: Int, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray.arange(stop, stream: stream)
}

public func arange(
    _ stop: Int, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray { MLXArray.arange(stop, dtype: dtype, stream: stream) }
