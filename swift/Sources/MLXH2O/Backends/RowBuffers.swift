import MLX

/// Keys and values as kernels get them: buffers, and template arguments by which to read them.
extension Rows {
    private static let keyNames = ["keys", "key_scales", "key_biases"]
    private static let valueNames = ["values", "value_scales", "value_biases"]

    /// Names of the buffers of "keys" or "values".
    static func bufferNames(_ field: String) -> [String] {
        field == "keys" ? keyNames : valueNames
    }

    /// Buffers by name.
    func buffers(_ field: String) -> [String: MLXArray] {
        Dictionary(uniqueKeysWithValues: zip(Rows.bufferNames(field), arrays))
    }

    /// Template arguments, in the terms of metal/packed_rows.h: 0 bits are dense rows.
    func packing(_ letter: String) -> [(String, any KernelTemplateArg)] {
        let (bits, group) =
            if case .packed(let rows) = self {
                (rows.bits, rows.groupSize)
            } else {
                (0, 1)
            }
        return [("\(letter)_BITS", bits), ("\(letter)_GROUP", group)]
    }

    /// Flat rows `[B, S, ...]` as those of one head, `[B, 1, S, ...]`.
    var withHeadAxis: Rows {
        switch self {
        case .plain(let rows): .plain(rows.expandedDimensions(axis: 1))
        case .packed(let rows):
            .packed(
                PackedRows(
                    words: rows.words.expandedDimensions(axis: 1),
                    scales: rows.scales.expandedDimensions(axis: 1),
                    biases: rows.biases.expandedDimensions(axis: 1), bits: rows.bits,
                    groupSize: rows.groupSize))
        case .joined: fatalError("The kernels read rows of one kind.")
        }
    }

    /// Bytes of one row.
    var rowBytes: Int { arrays.reduce(0) { $0 + $1.dim(-1) * $1.dtype.size } }

    var isPacked: Bool {
        if case .packed = self { true } else { false }
    }

    private var arrays: [MLXArray] {
        switch self {
        case .plain(let rows): [rows]
        case .packed(let rows): [rows.words, rows.scales, rows.biases]
        case .joined: fatalError("The kernels read rows of one kind.")
        }
    }
}

extension FrameArrays {
    /// Buffers by name.
    var buffers: [String: MLXArray] {
        ["frame_centre": centre.contiguous(), "frame_scale": scale.contiguous()]
    }
}

extension Remainder {
    static let bufferNames = ["counts", "mean_keys", "var_keys", "mean_values"]

    /// Buffers by name.
    var buffers: [String: MLXArray] {
        Dictionary(
            uniqueKeysWithValues: zip(Remainder.bufferNames, arrays.map { $0.contiguous() }))
    }
}
