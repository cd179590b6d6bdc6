import Cmlx
import Foundation

extension MLXArray {
    /// The value of an array of one element, converted when T is another type.
    public func item<T: HasDType>() -> T { item(T.self) }

    public func item<T: HasDType>(_ type: T.Type) -> T { contiguousValues(type)[0] }

    /// All values in row-major order, converted when T is another type.
    public func asArray<T: HasDType>(_ type: T.Type) -> [T] { contiguousValues(type) }

    private func contiguousValues<T: HasDType>(_ type: T.Type) -> [T] {
        let array = asType(T.dtype).contiguous()
        array.eval()
        let count = Swift.max(array.size, size)
        return [T](unsafeUninitializedCapacity: count) { values, initialized in
            let bytes = UnsafeMutableRawBufferPointer(values)
            if let data = mlx_array_data_uint8(array.ctx) {
                bytes.copyMemory(from: UnsafeRawBufferPointer(start: data, count: array.nbytes))
            } else {
                // The error has been reported; the caller's withError will throw it.
                bytes.initializeMemory(as: UInt8.self, repeating: 0)
            }
            initialized = count
        }
    }

    public enum AccessMethod {
        case copy
        case noCopyIfContiguous
        case noCopy
    }

    /// An array's bytes and how they are laid out; strides count elements.
    public struct MLXArrayData {
        public let data: Data
        public let shape: [Int]
        public let strides: [Int]
        public let dType: DType
    }

    public func asData(access: AccessMethod = .copy) -> MLXArrayData {
        eval()
        var contiguousRows = false
        _mlx_array_is_row_contiguous(&contiguousRows, ctx)
        switch access {
        case .copy: return contiguous().bytes { Data(bytes: $0, count: $1) }
        case .noCopyIfContiguous where !contiguousRows: return asData(access: .copy)
        case .noCopyIfContiguous, .noCopy:
            return bytes {
                Data(
                    bytesNoCopy: UnsafeMutableRawPointer(mutating: $0), count: $1,
                    deallocator: .none)
            }
        }
    }

    private func bytes(_ make: (UnsafeRawPointer, Int) -> Data) -> MLXArrayData {
        eval()
        return MLXArrayData(
            data: make(mlx_array_data_uint8(ctx), nbytes), shape: shape, strides: strides,
            dType: dtype)
    }
}
