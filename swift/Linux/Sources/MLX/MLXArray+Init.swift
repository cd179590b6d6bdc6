import Cmlx
import Foundation

extension MLXArray {
    private static func copying(
        _ data: UnsafeRawPointer?, _ shape: [Int], _ dtype: DType
    ) -> mlx_array {
        initError()
        return mlx_array_new_data(data, shape.asInt32, Int32(shape.count), dtype.cmlxDtype)
    }

    public convenience init(_ value: Int32) { self.init(mlx_array_new_int(value)) }
    public convenience init(_ value: Int) { self.init(Int32(value)) }
    public convenience init(_ value: Bool) { self.init(mlx_array_new_bool(value)) }
    public convenience init(_ value: Float) { self.init(mlx_array_new_float(value)) }

    public convenience init(int64 value: Int) {
        self.init(withUnsafePointer(to: value) { Self.copying($0, [], .int64) })
    }

    /// A scalar of its own dtype; a Double becomes float32.
    public convenience init<T: HasDType>(_ value: T) {
        if let value = value as? Double {
            self.init(Float(value))
        } else {
            self.init(withUnsafePointer(to: value) { Self.copying($0, [], T.dtype) })
        }
    }

    public convenience init<T: HasDType>(_ value: T, dtype: DType) {
        let own = withUnsafePointer(to: value) { MLXArray(Self.copying($0, [], T.dtype)) }
        self.init(Self.retained(own.asType(dtype)))
    }

    private static func retained(_ array: MLXArray) -> mlx_array {
        var ctx = mlx_array_new()
        mlx_array_set(&ctx, array.ctx)
        return ctx
    }

    public convenience init<T: HasDType>(
        _ value: [T], _ shape: (some Collection<Int>)? = [Int]?.none
    ) {
        let shape = shape.map { Array($0) } ?? [value.count]
        precondition(shape.reduce(1, *) == value.count, "\(value.count) values for \(shape)")
        self.init(value.withUnsafeBytes { Self.copying($0.baseAddress, shape, T.dtype) })
    }

    /// Int32 values.
    public convenience init(_ value: [Int], _ shape: (some Collection<Int>)? = [Int]?.none) {
        self.init(value.map { Int32($0) }, shape)
    }

    public convenience init(
        converting value: [Double], _ shape: (some Collection<Int>)? = [Int]?.none
    ) {
        self.init(value.map { Float($0) }, shape)
    }

    public convenience init<S: Sequence>(
        _ sequence: S, _ shape: (some Collection<Int>)? = [Int]?.none
    ) where S.Element: HasDType {
        let value = Array(sequence)
        if let value = value as? [Int] {
            self.init(value, shape)
        } else {
            self.init(value, shape)
        }
    }

    public convenience init(
        _ data: Data, _ shape: (some Collection<Int>)? = [Int]?.none, dtype: DType
    ) {
        let shape = shape.map { Array($0) } ?? [data.count / dtype.size]
        precondition(shape.reduce(dtype.size, *) == data.count, "\(data.count) bytes for \(shape)")
        self.init(data.withUnsafeBytes { Self.copying($0.baseAddress, shape, dtype) })
    }

    public convenience init(
        _ data: Data, _ shape: (some Collection<Int>)? = [Int]?.none, type: (some HasDType).Type
    ) {
        self.init(data, shape, dtype: type.dtype)
    }
}

extension MLXArray: ExpressibleByArrayLiteral {
    public convenience init(arrayLiteral elements: Int32...) { self.init(elements) }
}
