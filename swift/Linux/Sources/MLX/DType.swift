import Cmlx

/// The type of an array's elements.
public enum DType: Hashable, Sendable, CaseIterable {
    case bool
    case uint8
    case uint16
    case uint32
    case uint64
    case int8
    case int16
    case int32
    case int64
    case float16
    case float32
    case bfloat16
    case complex64
    case float64

    init(_ type: mlx_dtype) {
        guard let found = DType.allCases.first(where: { $0.cmlxDtype == type }) else {
            fatalError("unknown dtype \(type)")
        }
        self = found
    }

    public var cmlxDtype: mlx_dtype {
        switch self {
        case .bool: MLX_BOOL
        case .uint8: MLX_UINT8
        case .uint16: MLX_UINT16
        case .uint32: MLX_UINT32
        case .uint64: MLX_UINT64
        case .int8: MLX_INT8
        case .int16: MLX_INT16
        case .int32: MLX_INT32
        case .int64: MLX_INT64
        case .float16: MLX_FLOAT16
        case .float32: MLX_FLOAT32
        case .bfloat16: MLX_BFLOAT16
        case .complex64: MLX_COMPLEX64
        case .float64: MLX_FLOAT64
        }
    }

    public var size: Int { mlx_dtype_size(cmlxDtype) }

    public var isFloatingPoint: Bool {
        switch self {
        case .float16, .float32, .bfloat16, .complex64, .float64: true
        default: false
        }
    }
}

/// A Swift type that is an element type of arrays.
public protocol HasDType: ScalarOrArray {
    static var dtype: DType { get }
}

/// What may stand on either side of an operator: an array, or a scalar that takes its dtype.
public protocol ScalarOrArray {
    func asMLXArray(dtype: DType?) -> MLXArray
}

extension MLXArray: ScalarOrArray {
    public func asMLXArray(dtype: DType?) -> MLXArray { self }
}

extension Array: ScalarOrArray where Element: HasDType {
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray(self).asType(dtype ?? Element.dtype)
    }
}

extension HasDType {
    public func asMLXArray(dtype: DType?) -> MLXArray { MLXArray(self, dtype: dtype ?? Self.dtype) }
}

// An integer keeps its type beside booleans, a floating-point number beside all but floating-point
// arrays. Int alone means int32, Double float32.
extension HasDType where Self: BinaryInteger {
    public func asMLXArray(dtype: DType?) -> MLXArray {
        let own: DType = self is Int ? .int32 : Self.dtype
        let wanted = dtype ?? own
        return MLXArray(self, dtype: wanted == .bool ? own : wanted)
    }
}

extension HasDType where Self: BinaryFloatingPoint {
    public func asMLXArray(dtype: DType?) -> MLXArray {
        let own: DType = self is Double ? .float32 : Self.dtype
        let wanted = dtype ?? own
        return MLXArray(self, dtype: wanted.isFloatingPoint ? wanted : own)
    }
}

extension Bool: HasDType { public static var dtype: DType { .bool } }
extension Int: HasDType { public static var dtype: DType { .int64 } }
extension Int8: HasDType { public static var dtype: DType { .int8 } }
extension Int16: HasDType { public static var dtype: DType { .int16 } }
extension Int32: HasDType { public static var dtype: DType { .int32 } }
extension Int64: HasDType { public static var dtype: DType { .int64 } }
extension UInt: HasDType { public static var dtype: DType { .uint64 } }
extension UInt8: HasDType { public static var dtype: DType { .uint8 } }
extension UInt16: HasDType { public static var dtype: DType { .uint16 } }
extension UInt32: HasDType { public static var dtype: DType { .uint32 } }
extension UInt64: HasDType { public static var dtype: DType { .uint64 } }
extension Float: HasDType { public static var dtype: DType { .float32 } }
extension Double: HasDType { public static var dtype: DType { .float64 } }
#if !arch(x86_64)
    extension Float16: HasDType { public static var dtype: DType { .float16 } }
#endif

/// Both sides of an operator as arrays; a scalar takes the array's dtype.
public func toArrays(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray
) -> (MLXArray, MLXArray) {
    switch (a as? MLXArray, b as? MLXArray) {
    case (let a?, let b?): (a, b)
    case (let a?, nil): (a, b.asMLXArray(dtype: a.dtype))
    case (nil, let b?): (a.asMLXArray(dtype: b.dtype), b)
    case (nil, nil): (a.asMLXArray(dtype: nil), b.asMLXArray(dtype: nil))
    }
}
