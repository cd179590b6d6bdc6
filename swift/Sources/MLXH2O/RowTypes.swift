import MLX

/// What rows of a layer must have in common: batch, heads, widths and dtypes.
struct RowTypes: Equatable, CustomStringConvertible {
    let batch, heads, keyWidth, valueWidth: Int
    let keyDType, valueDType: DType

    /// What keys and values may be.
    static let dtypes: [DType] = [.float32, .float16, .bfloat16]

    /// Of keys `[B, H, L, D]` and values `[B, H, L, Dv]`.
    init(keys: MLXArray, values: MLXArray) {
        self.init(
            batch: keys.dim(0), heads: keys.dim(1), keyWidth: keys.dim(3),
            valueWidth: values.dim(3), keyDType: keys.dtype, valueDType: values.dtype)
    }

    init(
        batch: Int, heads: Int, keyWidth: Int, valueWidth: Int, keyDType: DType, valueDType: DType
    ) {
        (self.batch, self.heads) = (batch, heads)
        (self.keyWidth, self.valueWidth) = (keyWidth, valueWidth)
        (self.keyDType, self.valueDType) = (keyDType, valueDType)
    }

    var description: String {
        "\(batch) x \(heads) KV heads of \(keyWidth) and \(valueWidth) \(keyDType)"
    }

    /// Whether only the dtypes differ.
    func fits(_ other: RowTypes) -> Bool {
        batch == other.batch && heads == other.heads && keyWidth == other.keyWidth
            && valueWidth == other.valueWidth
    }

    /// Throw ``H2OError/configuration(_:)`` unless a cache can store such rows.
    func check() throws {
        for dtype in [keyDType, valueDType] where !Self.dtypes.contains(dtype) {
            throw H2OError.configuration(
                "Keys and values must be float32, float16 or bfloat16; got \(dtype).")
        }
    }
}
