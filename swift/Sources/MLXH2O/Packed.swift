import MLX

/// Rows in affine quantization, as MLX's `quantized` packs them: w = scale * level + bias, per group
/// of a row's elements.
struct PackedRows {
    /// `[..., rows, width * bits / 32]` uint32.
    let words: MLXArray
    /// `[..., rows, width / groupSize]` in the model's dtype.
    let scales: MLXArray
    /// Likewise.
    let biases: MLXArray
    let bits: Int
    let groupSize: Int

    /// Of the rows as numbers, `[..., rows, width]`.
    var shape: [Int] { Array(words.shape.dropLast()) + [words.dim(-1) * 32 / bits] }

    /// The rows as float32, without rounding to the model's dtype.
    var dequantizedRows: MLXArray {
        dequantized(
            words, scales: scales.float32, biases: biases.float32, groupSize: groupSize, bits: bits)
    }

    func sliced(_ range: Range<Int>, axis: Int) -> PackedRows {
        PackedRows(
            words: words.sliced(range, axis: axis), scales: scales.sliced(range, axis: axis),
            biases: biases.sliced(range, axis: axis), bits: bits, groupSize: groupSize)
    }
}

/// Keys or values, dense or packed.
enum Rows {
    case plain(MLXArray)
    case packed(PackedRows)

    /// Of the rows as numbers, `[..., rows, width]`.
    var shape: [Int] {
        switch self {
        case .plain(let rows): rows.shape
        case .packed(let rows): rows.shape
        }
    }

    /// Of the rows before they were packed.
    var dtype: DType {
        switch self {
        case .plain(let rows): rows.dtype
        case .packed(let rows): rows.scales.dtype
        }
    }

    /// The rows as an array of numbers.
    var dense: MLXArray {
        switch self {
        case .plain(let rows): rows
        case .packed(let rows): rows.dequantizedRows
        }
    }

    func sliced(_ range: Range<Int>, axis: Int) -> Rows {
        switch self {
        case .plain(let rows): .plain(rows.sliced(range, axis: axis))
        case .packed(let rows): .packed(rows.sliced(range, axis: axis))
        }
    }
}

/// How a cache stores its keys and values.
public struct Packing: Sendable, Equatable {
    /// Bits of a key's element (2, 3, 4, 5, 6 or 8), or nil for the model's own dtype.
    public let keyBits: Int?
    /// Bits of a value's element, likewise. Keys are the sensitive half: their errors go through the
    /// exponential.
    public let valueBits: Int?
    /// Elements that share a scale and a bias: 32, 64 or 128.
    public let groupSize: Int

    /// Rows as they come.
    public static let dense = Packing()

    private init() {
        (keyBits, valueBits, groupSize) = (nil, nil, 64)
    }

    /// - Throws: ``H2OError/configuration(_:)`` for bits or group sizes that MLX does not know.
    public init(keyBits: Int? = nil, valueBits: Int? = nil, groupSize: Int = 64) throws {
        for (name, bits) in [("keyBits", keyBits), ("valueBits", valueBits)] {
            if let bits, ![2, 3, 4, 5, 6, 8].contains(bits) {
                throw H2OError.configuration(
                    "\(name) must be one of 2, 3, 4, 5, 6, 8, or nil; got \(bits).")
            }
        }
        guard [32, 64, 128].contains(groupSize) else {
            throw H2OError.configuration(
                "groupSize must be one of 32, 64, 128; got \(groupSize).")
        }
        (self.keyBits, self.valueBits, self.groupSize) = (keyBits, valueBits, groupSize)
    }

    /// Whether anything is packed.
    public var packs: Bool { keyBits != nil || valueBits != nil }

    func bits(_ name: String) -> Int? { name == "keys" ? keyBits : valueBits }

    /// What a store keeps of new rows `[..., width]` of a field, by name.
    func fields(_ name: String, _ rows: MLXArray) -> Fields {
        guard let bits = bits(name) else { return [name: rows] }
        precondition(
            rows.dim(-1) % groupSize == 0,
            "Rows of width \(rows.dim(-1)) cannot be packed in groups of \(groupSize).")
        let packed = quantized(rows, groupSize: groupSize, bits: bits)
        return [
            name: packed.wq, name + ".scales": packed.scales, name + ".biases": packed.biases!,
        ]
    }

    /// A field's rows out of what a store keeps.
    func rows(_ name: String, _ fields: Fields) -> Rows {
        guard let bits = bits(name) else { return .plain(fields[name]!) }
        return .packed(
            PackedRows(
                words: fields[name]!, scales: fields[name + ".scales"]!,
                biases: fields[name + ".biases"]!, bits: bits, groupSize: groupSize))
    }

    /// Bytes of one row of a field whose dense elements take `elementSize`.
    func rowBytes(_ name: String, width: Int, elementSize: Int) -> Int {
        guard let bits = bits(name) else { return width * elementSize }
        return width * bits / 8 + 2 * elementSize * (width / groupSize)
    }
}
