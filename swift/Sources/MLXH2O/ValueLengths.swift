import MLX

// How long values are: what a policy may weigh tokens by. Of dense values lengths are kept beside the
// rows; of packed ones their scales tell how far elements reach, which ranks them as well.

/// log ||v||^2 `[...]` float16 of dense values `[..., Dv]`, as a store keeps them.
func valueLengths(_ values: MLXArray) -> MLXArray {
    logarithm(of: values.float32).asType(.float16)
}

// Log of the sum of squares of `[..., n]` float32.
private func logarithm(of elements: MLXArray) -> MLXArray {
    // Keeps the logarithm of a zero vector from stretching the scale of all.
    log(maximum(square(elements).sum(axis: -1), Float(1e-12)))
}

extension Rows {
    /// The same of values of any kind, `[...]` float32: of packed ones the ranges of their groups stand
    /// for the elements.
    var lengths: MLXArray {
        switch self {
        case .plain(let rows): valueLengths(rows).float32
        case .packed(let rows): logarithm(of: rows.scales.float32 * Float((1 << rows.bits) - 1))
        case .joined(let parts): MLXH2O.joined(parts.map(\.lengths), axis: -1)
        }
    }
}

extension Policy {
    /// Whether lengths of values are kept beside rows that are stored so.
    func keepsValueLengths(in packing: H2OPacking) -> Bool {
        Self.usesValueLengths && packing.valueBits == nil
    }
}
