import Cmlx

/// An N-dimensional array: a node of MLX's lazy graph.
public final class MLXArray {
    public internal(set) var ctx: mlx_array

    /// Takes over the reference that `ctx` holds.
    public init(_ ctx: consuming mlx_array) {
        initError()
        self.ctx = ctx
    }

    /// The empty handle that stands for "none" in C.
    public static var mlxNone: MLXArray { MLXArray(mlx_array_new()) }

    deinit { mlx_array_free(ctx) }

    public var itemSize: Int { mlx_array_itemsize(ctx) }
    public var size: Int { mlx_array_size(ctx) }
    public var count: Int { dim(0) }
    public var nbytes: Int { mlx_array_nbytes(ctx) }
    public var ndim: Int { mlx_array_ndim(ctx) }
    public var dtype: DType { DType(mlx_array_dtype(ctx)) }
    public var shape: [Int] {
        UnsafeBufferPointer(start: mlx_array_shape(ctx), count: ndim).map { Int($0) }
    }
    var strides: [Int] {
        UnsafeBufferPointer(start: mlx_array_strides(ctx), count: ndim).map { Int($0) }
    }

    public func dim(_ dim: Int) -> Int { Int(mlx_array_dim(ctx, Int32(dim))) }

    public func asType(_ type: DType, stream: StreamOrDevice = .default) -> MLXArray {
        type == dtype ? self : result { mlx_astype(&$0, ctx, type.cmlxDtype, stream.ctx) }
    }

    public func asType(
        _ type: (some HasDType).Type, stream: StreamOrDevice = .default
    ) -> MLXArray { asType(type.dtype, stream: stream) }

    public func eval() { _ = mlx_array_eval(ctx) }

    /// Makes this object stand for another array.
    public func _updateInternal(_ array: MLXArray) { mlx_array_set(&ctx, array.ctx) }
}

extension MLXArray: Updatable, Evaluatable {
    public func innerState() -> [MLXArray] { [self] }
}

extension MLXArray: CustomStringConvertible {
    public var description: String { text { mlx_array_tostring(&$0, ctx) } }
}

extension MLXArray: Sequence {
    /// The rows along the first axis.
    public func makeIterator() -> some IteratorProtocol<MLXArray> {
        (0 ..< dim(0)).lazy.map { self[$0] }.makeIterator()
    }
}

/// What holds arrays that `eval` can evaluate.
public protocol Evaluatable {
    func innerState() -> [MLXArray]
}

public protocol Updatable {
    func innerState() -> [MLXArray]
}

extension [MLXArray]: Updatable, Evaluatable {
    public func innerState() -> [MLXArray] { self }
}
