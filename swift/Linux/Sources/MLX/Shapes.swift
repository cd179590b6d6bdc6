import Cmlx

extension MLXArray {
    public func reshaped(
        _ newShape: some Collection<Int>, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_reshape(&$0, ctx, newShape.asInt32, newShape.count, stream.ctx) } }

    public func reshaped(_ newShape: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        reshaped(newShape, stream: stream)
    }

    public func transposed(stream: StreamOrDevice = .default) -> MLXArray {
        result { mlx_transpose(&$0, ctx, stream.ctx) }
    }

    public func transposed(
        axes: some Collection<Int>, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_transpose_axes(&$0, ctx, axes.asInt32, axes.count, stream.ctx) } }

    public func transposed(_ axes: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        transposed(axes: axes, stream: stream)
    }

    public var T: MLXArray { transposed() }

    public func swappedAxes(
        _ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_swapaxes(&$0, ctx, Int32(axis1), Int32(axis2), stream.ctx) } }

    public func expandedDimensions(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        result { mlx_expand_dims(&$0, ctx, Int32(axis), stream.ctx) }
    }

    public func expandedDimensions(
        axes: some Collection<Int>, stream: StreamOrDevice = .default
    ) -> MLXArray {
        result { mlx_expand_dims_axes(&$0, ctx, axes.asInt32, axes.count, stream.ctx) }
    }

    public func flattened(
        start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_flatten(&$0, ctx, Int32(start), Int32(end), stream.ctx) } }

    public func split(
        parts: Int, axis: Int = 0, stream: StreamOrDevice = .default
    ) -> [MLXArray] { results { mlx_split(&$0, ctx, Int32(parts), Int32(axis), stream.ctx) } }

    public func split(
        indices: some Collection<Int>, axis: Int = 0, stream: StreamOrDevice = .default
    ) -> [MLXArray] {
        results {
            mlx_split_sections(&$0, ctx, indices.asInt32, indices.count, Int32(axis), stream.ctx)
        }
    }

    public func split(
        axis: Int = 0, stream: StreamOrDevice = .default
    ) -> (MLXArray, MLXArray) {
        let halves = split(parts: 2, axis: axis, stream: stream)
        return (halves[0], halves[1])
    }

    /// The same bytes read as another type.
    public func view(dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
        result { mlx_view(&$0, ctx, dtype.cmlxDtype, stream.ctx) }
    }

    public func contiguous(
        allowColMajor: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_contiguous(&$0, ctx, allowColMajor, stream.ctx) } }
}

public func reshaped(
    _ array: MLXArray, _ newShape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray { array.reshaped(newShape, stream: stream) }

public func transposed(
    _ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray { array.transposed(axes: axes, stream: stream) }

public func swappedAxes(
    _ array: MLXArray, _ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default
) -> MLXArray { array.swappedAxes(axis1, axis2, stream: stream) }

public func expandedDimensions(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray { array.expandedDimensions(axis: axis, stream: stream) }

public func expandedDimensions(
    _ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray { array.expandedDimensions(axes: axes, stream: stream) }

public func flattened(
    _ array: MLXArray, start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default
) -> MLXArray { array.flattened(start: start, end: end, stream: stream) }

public func split(
    _ array: MLXArray, parts: Int, axis: Int = 0, stream: StreamOrDevice = .default
) -> [MLXArray] { array.split(parts: parts, axis: axis, stream: stream) }

public func split(
    _ array: MLXArray, indices: some Collection<Int>, axis: Int = 0,
    stream: StreamOrDevice = .default
) -> [MLXArray] { array.split(indices: indices, axis: axis, stream: stream) }

public func broadcast(
    _ array: MLXArray, to shape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_broadcast_to(&$0, array.ctx, shape.asInt32, shape.count, stream.ctx) }
}

public func concatenated(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(arrays) { vector in
        result { mlx_concatenate_axis(&$0, vector, Int32(axis), stream.ctx) }
    }
}

public func stacked(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(arrays) { vector in
        result { mlx_stack_axis(&$0, vector, Int32(axis), stream.ctx) }
    }
}

public func repeated(
    _ array: MLXArray, count: Int, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    result { mlx_repeat_axis(&$0, array.ctx, Int32(count), Int32(axis), stream.ctx) }
}

public func repeated(
    _ array: MLXArray, count: Int, stream: StreamOrDevice = .default
) -> MLXArray { result { mlx_repeat(&$0, array.ctx, Int32(count), stream.ctx) } }

/// How far an axis is padded: before and after.
public struct IntOrPair: ExpressibleByIntegerLiteral, ExpressibleByArrayLiteral, Sendable {
    public let values: (Int, Int)

    public init(integerLiteral value: Int) { values = (value, value) }
    public init(arrayLiteral elements: Int...) { values = (elements[0], elements[1]) }
    public init(_ values: (Int, Int)) { self.values = values }
    public init(_ value: Int) { values = (value, value) }
}

public enum PadMode: String {
    case constant
    case edge
}

public func padded(
    _ array: MLXArray, width: IntOrPair, mode: PadMode = .constant, value: MLXArray? = nil,
    stream: StreamOrDevice = .default
) -> MLXArray {
    padded(
        array, widths: Array(repeating: width, count: array.ndim), mode: mode, value: value,
        stream: stream)
}

public func padded(
    _ array: MLXArray, widths: some Collection<IntOrPair>, mode: PadMode = .constant,
    value: MLXArray? = nil, stream: StreamOrDevice = .default
) -> MLXArray {
    let value = value ?? MLXArray(0, dtype: array.dtype)
    let low = widths.map { Int32($0.values.0) }
    let high = widths.map { Int32($0.values.1) }
    let axes = (0 ..< widths.count).asInt32
    return result {
        mlx_pad(
            &$0, array.ctx, axes, axes.count, low, low.count, high, high.count, value.ctx,
            mode.rawValue, stream.ctx)
    }
}

public func contiguous(
    _ a: MLXArray, allowColMajor: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { a.contiguous(allowColMajor: allowColMajor, stream: stream) }
