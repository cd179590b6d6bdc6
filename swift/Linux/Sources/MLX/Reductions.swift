import Cmlx

private typealias Whole = (UnsafeMutablePointer<mlx_array>?, mlx_array, Bool, mlx_stream) -> Int32
private typealias OverAxis =
    (UnsafeMutablePointer<mlx_array>?, mlx_array, Int32, Bool, mlx_stream) -> Int32
private typealias OverAxes =
    (UnsafeMutablePointer<mlx_array>?, mlx_array, UnsafePointer<Int32>?, Int, Bool, mlx_stream) ->
    Int32

extension MLXArray {
    private func reduce(_ call: Whole, _ keepDims: Bool, _ stream: StreamOrDevice) -> MLXArray {
        result { call(&$0, ctx, keepDims, stream.ctx) }
    }
    private func reduce(
        _ call: OverAxis, _ axis: Int, _ keepDims: Bool, _ stream: StreamOrDevice
    ) -> MLXArray { result { call(&$0, ctx, Int32(axis), keepDims, stream.ctx) } }
    private func reduce(
        _ call: OverAxes, _ axes: some Collection<Int>, _ keepDims: Bool, _ stream: StreamOrDevice
    ) -> MLXArray { result { call(&$0, ctx, axes.asInt32, axes.count, keepDims, stream.ctx) } }

    public func all(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_all, keepDims, stream)
    }
    public func all(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_all_axis, axis, keepDims, stream) }
    public func all(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_all_axes, axes, keepDims, stream) }

    public func any(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_any, keepDims, stream)
    }
    public func any(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_any_axis, axis, keepDims, stream) }
    public func any(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_any_axes, axes, keepDims, stream) }

    public func logSumExp(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_logsumexp, keepDims, stream)
    }
    public func logSumExp(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_logsumexp_axis, axis, keepDims, stream) }
    public func logSumExp(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_logsumexp_axes, axes, keepDims, stream) }

    public func max(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_max, keepDims, stream)
    }
    public func max(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_max_axis, axis, keepDims, stream) }
    public func max(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_max_axes, axes, keepDims, stream) }

    public func mean(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_mean, keepDims, stream)
    }
    public func mean(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_mean_axis, axis, keepDims, stream) }
    public func mean(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_mean_axes, axes, keepDims, stream) }

    public func min(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_min, keepDims, stream)
    }
    public func min(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_min_axis, axis, keepDims, stream) }
    public func min(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_min_axes, axes, keepDims, stream) }

    public func product(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_prod, keepDims, stream)
    }
    public func product(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_prod_axis, axis, keepDims, stream) }
    public func product(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_prod_axes, axes, keepDims, stream) }

    public func sum(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_sum, keepDims, stream)
    }
    public func sum(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_sum_axis, axis, keepDims, stream) }
    public func sum(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_sum_axes, axes, keepDims, stream) }

    public func argMax(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_argmax, keepDims, stream)
    }
    public func argMax(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_argmax_axis, axis, keepDims, stream) }

    public func argMin(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        reduce(mlx_argmin, keepDims, stream)
    }
    public func argMin(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { reduce(mlx_argmin_axis, axis, keepDims, stream) }

    public func variance(
        keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_var(&$0, ctx, keepDims, Int32(ddof), stream.ctx) } }
    public func variance(
        axis: Int, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default
    ) -> MLXArray { variance(axes: [axis], keepDims: keepDims, ddof: ddof, stream: stream) }
    public func variance(
        axes: some Collection<Int>, keepDims: Bool = false, ddof: Int = 0,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        result {
            mlx_var_axes(&$0, ctx, axes.asInt32, axes.count, keepDims, Int32(ddof), stream.ctx)
        }
    }
}

public func all(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.all(keepDims: keepDims, stream: stream) }
public func all(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.all(axis: axis, keepDims: keepDims, stream: stream) }
public func all(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.all(axes: axes, keepDims: keepDims, stream: stream) }

public func any(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.any(keepDims: keepDims, stream: stream) }
public func any(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.any(axis: axis, keepDims: keepDims, stream: stream) }
public func any(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.any(axes: axes, keepDims: keepDims, stream: stream) }

public func logSumExp(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.logSumExp(keepDims: keepDims, stream: stream) }
public func logSumExp(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.logSumExp(axis: axis, keepDims: keepDims, stream: stream) }
public func logSumExp(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.logSumExp(axes: axes, keepDims: keepDims, stream: stream) }

public func max(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.max(keepDims: keepDims, stream: stream) }
public func max(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.max(axis: axis, keepDims: keepDims, stream: stream) }
public func max(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.max(axes: axes, keepDims: keepDims, stream: stream) }

public func mean(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.mean(keepDims: keepDims, stream: stream) }
public func mean(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.mean(axis: axis, keepDims: keepDims, stream: stream) }
public func mean(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.mean(axes: axes, keepDims: keepDims, stream: stream) }

public func min(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.min(keepDims: keepDims, stream: stream) }
public func min(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.min(axis: axis, keepDims: keepDims, stream: stream) }
public func min(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.min(axes: axes, keepDims: keepDims, stream: stream) }

public func product(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.product(keepDims: keepDims, stream: stream) }
public func product(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.product(axis: axis, keepDims: keepDims, stream: stream) }
public func product(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.product(axes: axes, keepDims: keepDims, stream: stream) }

public func sum(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.sum(keepDims: keepDims, stream: stream) }
public func sum(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.sum(axis: axis, keepDims: keepDims, stream: stream) }
public func sum(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray { array.sum(axes: axes, keepDims: keepDims, stream: stream) }

public func argMax(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.argMax(keepDims: keepDims, stream: stream) }
public func argMax(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.argMax(axis: axis, keepDims: keepDims, stream: stream) }

public func argMin(
    _ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.argMin(keepDims: keepDims, stream: stream) }
public func argMin(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { array.argMin(axis: axis, keepDims: keepDims, stream: stream) }

public func variance(
    _ array: MLXArray, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_var(&$0, array.ctx, keepDims, Int32(ddof), stream.ctx) } }
public func variance(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, ddof: Int = 0,
    stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_var_axis(&$0, array.ctx, Int32(axis), keepDims, Int32(ddof), stream.ctx) }
}
