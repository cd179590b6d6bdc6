import Cmlx

/// What may stand in `array[...]`: numbers, ranges, `.ellipsis`, `.newAxis`, `.stride`, arrays.
public protocol MLXArrayIndex {
    var mlxArrayIndexOperation: MLXArrayIndexOperation { get }
}

public enum MLXArrayIndexOperation {
    case ellipsis
    case newAxis
    case index(Int32)
    case slice(MLXSlice)
    case array(MLXArray)
}

extension Int: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .index(Int32(self)) }
}

extension MLXArray: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .array(self) }
}

public struct MLXEllipsisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .ellipsis }
}

extension MLXArrayIndex where Self == MLXEllipsisIndex {
    public static var ellipsis: Self { Self() }
}

public struct MLXNewAxisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .newAxis }
}

extension MLXArrayIndex where Self == MLXNewAxisIndex {
    public static var newAxis: Self { Self() }
}

/// `start ..< end` in steps; negative positions count from the end.
public struct MLXSlice: MLXArrayIndex, Equatable, Sendable {
    let first: Int32?
    let last: Int32?
    public let stride: Int32

    public init(start: Int32? = nil, end: Int32? = nil, stride: Int32? = nil) {
        first = start
        last = end
        self.stride = stride ?? 1
    }

    public func start(_ size: Int32) -> Int32 { first ?? (stride < 0 ? size - 1 : 0) }
    public func end(_ size: Int32) -> Int32 { last ?? (stride < 0 ? -size - 1 : size) }

    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .slice(self) }
}

extension MLXArrayIndex where Self == MLXSlice {
    public static func stride(
        from start: Int? = nil, to end: Int? = nil, by stride: Int? = nil
    ) -> MLXSlice {
        MLXSlice(
            start: start.map { Int32($0) }, end: end.map { Int32($0) },
            stride: stride.map { Int32($0) })
    }
}

extension Range<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(MLXSlice(start: Int32(lowerBound), end: Int32(upperBound)))
    }
}

extension ClosedRange<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(MLXSlice(start: Int32(lowerBound), end: Int32(upperBound) + 1))
    }
}

extension PartialRangeUpTo<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(MLXSlice(end: Int32(upperBound)))
    }
}

extension PartialRangeThrough<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(MLXSlice(end: Int32(upperBound) + 1))
    }
}

extension PartialRangeFrom<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(MLXSlice(start: Int32(lowerBound)))
    }
}

extension MLXArray {
    public subscript(
        indices: any MLXArrayIndex..., stream stream: StreamOrDevice = .default
    ) -> MLXArray {
        get { self[indices, stream: stream] }
        set { self[indices, stream: stream] = newValue }
    }

    public subscript(
        indices: [any MLXArrayIndex], stream stream: StreamOrDevice = .default
    ) -> MLXArray {
        get { Selection(of: self, indices, stream).value(in: self) }
        set { _updateInternal(Selection(of: self, indices, stream).setting(newValue, in: self)) }
    }
}

/// One indexing expression, read against one shape, with numpy's rules: slices first (one
/// `mlx_slice`), then all arrays and numbers beside them in one gather or scatter, then the axes
/// put in order.
private struct Selection {
    /// An axis of the result: one of the source, a new one, or those of the gathered indices.
    enum Part {
        case kept(Int)
        case new
        case gathered
    }

    let shape: [Int]
    let stream: StreamOrDevice
    var starts: [Int32]
    var ends: [Int32]
    var strides: [Int32]
    var parts: [Part] = []
    var gatheredAxes: [Int32] = []
    var gatheredIndices: [MLXArray] = []

    init(of source: MLXArray, _ indices: [any MLXArrayIndex], _ stream: StreamOrDevice) {
        shape = source.shape
        self.stream = stream
        starts = shape.map { _ in 0 }
        ends = shape.asInt32
        strides = shape.map { _ in 1 }

        var operations = indices.map { $0.mlxArrayIndexOperation }
        let named = operations.filter {
            switch $0 {
            case .ellipsis, .newAxis: false
            default: true
            }
        }.count
        precondition(named <= shape.count, "\(named) indices for \(shape.count) axes")
        let whole = Array(
            repeating: MLXArrayIndexOperation.slice(MLXSlice()), count: shape.count - named)
        let ellipsis = operations.firstIndex { if case .ellipsis = $0 { true } else { false } }
        if let ellipsis {
            operations.replaceSubrange(ellipsis ... ellipsis, with: whole)
        } else {
            operations += whole
        }

        let gathers = operations.contains { if case .array = $0 { true } else { false } }
        var axis = 0
        var places: [Int] = []
        for (place, operation) in operations.enumerated() {
            switch operation {
            case .ellipsis: fatalError("more than one .ellipsis")
            case .newAxis:
                parts.append(.new)
                continue
            case .slice(let slice):
                starts[axis] = slice.start(ends[axis])
                strides[axis] = slice.stride
                ends[axis] = slice.end(ends[axis])
                parts.append(.kept(axis))
            case .index(let index) where !gathers:
                starts[axis] = index < 0 ? index + ends[axis] : index
                ends[axis] = starts[axis] + 1
            case .index, .array:
                let indices =
                    switch operation {
                    case .array(let array): array
                    case .index(let index): MLXArray(index < 0 ? index + ends[axis] : index)
                    default: fatalError()
                    }
                if places.isEmpty { parts.append(.gathered) }
                places.append(place)
                gatheredAxes.append(Int32(axis))
                gatheredIndices.append(indices)
            }
            axis += 1
        }
        // Indices with something between them: numpy puts their axes first.
        if let first = places.first, places.last! - first + 1 > places.count {
            parts.removeAll { if case .gathered = $0 { true } else { false } }
            parts.insert(.gathered, at: 0)
        }
    }

    var slicesAll: Bool {
        starts.allSatisfy { $0 == 0 } && ends == shape.asInt32 && strides.allSatisfy { $0 == 1 }
    }

    func sliced(_ source: MLXArray) -> MLXArray {
        slicesAll
            ? source
            : result {
                mlx_slice(
                    &$0, source.ctx, starts, starts.count, ends, ends.count, strides, strides.count,
                    stream.ctx)
            }
    }

    func value(in source: MLXArray) -> MLXArray {
        let source = sliced(source)
        if gatheredAxes.isEmpty { return source.shaped(resultShape(of: source, []), stream) }
        let sizes = gatherSizes(source)
        let gathered = withVector(gatheredIndices) { indices in
            result {
                mlx_gather(
                    &$0, source.ctx, indices, gatheredAxes, gatheredAxes.count, sizes, sizes.count,
                    stream.ctx)
            }
        }
        let indexShape = Array(gathered.shape.dropLast(source.ndim))
        let kept = keptAxes(source).map { source.dim($0) }
        return gathered.shaped(indexShape + kept, stream)
            .transposed(axes: order(indexShape.count, kept.count), stream: stream)
            .shaped(resultShape(of: source, indexShape), stream)
    }

    func setting(_ value: MLXArray, in source: MLXArray) -> MLXArray {
        let target = sliced(source)
        if gatheredAxes.isEmpty {
            return writing(spread(value, resultShape(of: target, [])), to: source, target.shape)
        }

        let indexShape = broadcastShape(gatheredIndices)
        let kept = keptAxes(target).map { target.dim($0) }
        let order = order(indexShape.count, kept.count)
        let updates = spread(value, resultShape(of: target, indexShape))
            .shaped(order.map { (indexShape + kept)[$0] }, stream)
            .transposed(axes: order.indices.map { order.firstIndex(of: $0)! }, stream: stream)
            .shaped(indexShape + gatherSizes(target).map { Int($0) }, stream)
            .asType(target.dtype, stream: stream)
        let scattered = withVector(gatheredIndices) { indices in
            result {
                mlx_scatter(
                    &$0, target.ctx, indices, updates.ctx, gatheredAxes, gatheredAxes.count,
                    stream.ctx)
            }
        }
        return slicesAll ? scattered : writing(scattered, to: source, target.shape)
    }

    private func writing(_ update: MLXArray, to source: MLXArray, _ shape: [Int]) -> MLXArray {
        let update = update.shaped(shape, stream)
        return result {
            mlx_slice_update(
                &$0, source.ctx, update.ctx, starts, starts.count, ends, ends.count, strides,
                strides.count, stream.ctx)
        }
    }

    private func spread(_ value: MLXArray, _ shape: [Int]) -> MLXArray {
        let extra = value.shape.prefix(max(0, value.ndim - shape.count))
        precondition(extra.allSatisfy { $0 == 1 }, "\(value.shape) does not fit \(shape)")
        let value = value.shaped(Array(value.shape.dropFirst(extra.count)), stream)
        return value.shape == shape ? value : broadcast(value, to: shape, stream: stream)
    }

    private func keptAxes(_ source: MLXArray) -> [Int] {
        (0 ..< source.ndim).filter { !gatheredAxes.contains(Int32($0)) }
    }

    private func gatherSizes(_ source: MLXArray) -> [Int32] {
        source.shape.indices.map { gatheredAxes.contains(Int32($0)) ? 1 : Int32(source.dim($0)) }
    }

    /// Where the axes of (indices..., kept...) go in the result.
    private func order(_ indexCount: Int, _ keptCount: Int) -> [Int] {
        var before = 0
        for part in parts {
            if case .gathered = part { break }
            if case .kept = part { before += 1 }
        }
        let kept = Array(indexCount ..< indexCount + keptCount)
        return kept.prefix(before) + Array(0 ..< indexCount) + kept.dropFirst(before)
    }

    private func resultShape(of source: MLXArray, _ indexShape: [Int]) -> [Int] {
        parts.flatMap { part in
            switch part {
            case .kept(let axis): [source.dim(axis)]
            case .new: [1]
            case .gathered: indexShape
            }
        }
    }
}

private func broadcastShape(_ arrays: [MLXArray]) -> [Int] {
    let count = arrays.map(\.ndim).max() ?? 0
    return (0 ..< count).map { axis in
        arrays.map { $0.ndim < count - axis ? 1 : $0.shape[axis - (count - $0.ndim)] }
            .max { ($0 == 1 ? -1 : $0) < ($1 == 1 ? -1 : $1) }!
    }
}

extension MLXArray {
    /// Reshaped, where that changes anything.
    fileprivate func shaped(_ shape: [Int], _ stream: StreamOrDevice) -> MLXArray {
        self.shape == shape ? self : reshaped(shape, stream: stream)
    }
}
